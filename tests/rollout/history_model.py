"""A model whose logits are a hash of the whole history that it finds in its cache.

One wrong slot, block table entry, page copy or position gives another history, and with it other
tokens: comparing the engine over this model with a plain loop over token lists tests everything
between the two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.config.rollout import RolloutConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.noise import sample_key, splitmix64_of
from isobit.kernels.operands import DELTA_CHUNK, DeltaShape, Drawn, Draws
from isobit.kernels.spec.head import draw, draw_tokens, log_softmax, truncate
from isobit.memory.cache_size import CacheSize, choose_cache_size
from isobit.models.tensor_parallel import WHOLE
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout import native
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import ForwardBatch, ModelRunner
from isobit.rollout.sequence import States

VOCAB = 11
MODULUS = (1 << 61) - 1


MULTIPLIERS = torch.tensor([splitmix64_of(0, token) | 1 for token in range(VOCAB)])


def history_hashes(tokens: Sequence[int], first: int) -> list[int]:
    """Of the history up to each token from place ``first`` on."""
    value, hashes = 0, list[int]()
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % MODULUS
        hashes.append(value)
    return hashes[first:]


def history_hash(tokens: Sequence[int]) -> int:
    return history_hashes(tokens, len(tokens) - 1)[0]


def logits_of(hashes: torch.Tensor, version: int) -> torch.Tensor:
    """FP32 [N, VOCAB] from 0 to 5, a pseudo-random function of the history and of the weights: the
    high bits of a product, which few operations make.
    """
    mixed = hashes[:, None] * MULTIPLIERS + splitmix64_of(1, version)
    return (mixed >> 40).bitwise_and_(0xFFFF).float().mul_(5 / 0x10000)


@dataclass
class HistoryModel:
    """A ModelRunner over a page-structured store of token ids; version counts up as often as a test
    says.  With carries it reads the history of each from these, and refuses one that is not that of
    the pages.
    """

    size: CacheSize
    page_tokens: int = 64
    version: int = 0
    batches: list[ForwardBatch] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    cleared: int = 0
    pages_cleared: list[int] = field(default_factory=list)
    poisoned: int | None = None  # a prompt token after which logits are NaN

    def __post_init__(self) -> None:
        self.store = torch.full((self.size.pages, self.page_tokens), -1, dtype=torch.int64)
        self.carried: dict[int, tuple[int, list[int]]] = {}
        """Of each carry its chunk, and entries of the store up to the last row of it that came."""

    def forward(self, batch: ForwardBatch) -> States:
        self.batches.append(batch)
        paged = batch.paged
        assert len(set(paged.slots.tolist())) == paged.slots.numel(), (
            "two tokens were written to one slot"
        )
        self.store.view(-1)[paged.slots] = batch.token_ids * 1000 + self.version % 1000
        hashes: list[int] = []
        end = 0
        if paged.carries is not None:
            _check_exclusive(paged.carries.t().tolist(), paged.counts, paged.lengths)
        assert (paged.carries is None) == (self.size.carries == 0)
        for place, (count, length, table) in enumerate(
            zip(paged.counts, paged.lengths, paged.block_table, strict=True)
        ):
            entries = self.store[table].view(-1)[:length]
            if paged.carries is not None:
                read, written = paged.carries[:, place].tolist()
                self._carry(read, written, entries.tolist(), count)
            assert bool((entries % 1000 == self.version % 1000).all()), (
                "a token was cached under other weights"
            )
            history = (entries // 1000).tolist()
            end += count
            assert history[length - count :] == batch.token_ids[end - count : end].tolist()
            assert batch.positions[end - count : end].tolist() == list(
                range(length - count, length)
            )
            hashes += history_hashes(history, length - count)
        return States(torch.tensor(hashes).unsqueeze(1))

    def _carry(self, read: int, written: int, entries: list[int], count: int) -> None:
        """Put ``count`` new rows behind what is carried."""
        first = len(entries) - count
        last_chunk = (len(entries) - 1) // DELTA_CHUNK
        if read < 0:
            assert first == 0, "a sequence goes on without what it carries"
        else:
            chunk, held = self.carried[read]
            if read == written:
                assert chunk == first // DELTA_CHUNK == last_chunk
            else:
                assert chunk == (first - 1) // DELTA_CHUNK < last_chunk
            assert held[:first] == entries[:first], "the carry is another's"
            if first < (chunk + 1) * DELTA_CHUNK:
                self.carried[read] = chunk, entries[: (chunk + 1) * DELTA_CHUNK]
        if read != written:
            self.carried[written] = last_chunk, entries

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logit_rows.append(hidden.shape[0])
        logits = logits_of(hidden.squeeze(1), self.version)
        if self.poisoned is not None:
            logits[hidden.squeeze(1) == history_hash([self.poisoned]), 3] = torch.nan
        return logits

    def draw(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        return draw_tokens(logits, draws)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len({*sources, *targets}) == len(set(sources)) + len(targets), (
            "pages are copied at once, in any order"
        )
        self.store[list(targets)] = self.store[list(sources)]

    def copy_carries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len({*sources, *targets}) == len(set(sources)) + len(targets)
        self.carried |= {
            target: self.carried[source] for source, target in zip(sources, targets, strict=True)
        }

    def clear_pages(self, pages: Sequence[int]) -> None:
        self.store[list(pages)] = -1
        self.pages_cleared += pages

    def clear(self) -> None:
        self.cleared += 1


def _check_exclusive(
    carries: Sequence[tuple[int, int]], counts: Sequence[int], lengths: Sequence[int]
) -> None:
    """What one sequence of a forward writes no other one reads or writes."""
    for place, (read, written) in enumerate(carries):
        others = {one for pair in (*carries[:place], *carries[place + 1 :]) for one in pair}
        assert written >= 0 and written not in others, "a carry is written that others use"
        if (lengths[place] - counts[place]) % DELTA_CHUNK:
            assert read not in others, "rows are put into a carry that others use"


@dataclass(frozen=True)
class FakeConfig:
    """Of a model whose cache takes no memory."""

    max_positions: int = 512
    vocab_size: int = VOCAB
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    delta: DeltaShape | None = None
    delta_layers: tuple[int, ...] = ()


class FakePolicy:
    config = FakeConfig()
    flow = None  # read by the cache alone, which a HistoryModel has not
    device = torch.device("cpu")
    backend = backend_of(device)

    def weights(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(tensor_parallel=WHOLE, kv_scales=None)


def make_engine(
    seed: int = 0,
    tokenizer: Any = None,
    page_tokens: int = 64,
    wrap: Callable[[ModelRunner], Any] | None = None,
    carries: int = 0,
    **sizes: Any,
) -> tuple[NativeEngine, HistoryModel]:
    """An engine over a HistoryModel, or over what ``wrap`` puts around it; ``sizes`` go into its
    RolloutConfig.
    """
    models: list[HistoryModel] = []

    def make(_: Any, size: CacheSize) -> Any:
        models.append(HistoryModel(size, page_tokens))
        return wrap(models[0]) if wrap else models[0]

    config = RolloutConfig.model_validate(
        {"kv_pages": 40, "max_sequences": 8, "max_batched_tokens": 100} | sizes
    )
    policy: Any = FakePolicy()
    with having_carries(carries):
        return NativeEngine(policy, config, tokenizer, seed, make), models[0]


@contextmanager
def having_carries(carries: int | None) -> Iterator[None]:
    """Engines that are made meanwhile have so many carries, or by default as their plan says."""

    def chosen(policy: Any, config: RolloutConfig) -> CacheSize:
        size = choose_cache_size(policy, config)
        return size if carries is None else replace(size, carries=carries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "choose_cache_size", chosen)
        yield


def request(index: int, length: int, samples: int = 1, **sampling: Any) -> Request:
    """A request with a prompt of its own of ``length`` tokens."""
    token_ids = tuple((index * 7 + place * place) % VOCAB for place in range(length))
    sampling.setdefault("max_new_tokens", 20)
    return Request(Prompt(f"p/{index}", "", token_ids), 0, samples, SamplingParams(**sampling))


Samples = list[tuple[list[int], list[float]]]
_known: dict[str, Samples] = {}


def plain_samples(request: Request, seed: int = 0, context: int = 512, version: int = 0) -> Samples:
    """The tokens and log-probabilities of every sample, one token at a time over a plain list;
    remembered, since several engines are asked for the same.
    """
    name = repr((request, seed, context, version))
    if name not in _known:
        _known[name] = _drawn_one_by_one(request, seed, context, version)
    return _known[name]


def _drawn_one_by_one(request: Request, seed: int, context: int, version: int) -> Samples:
    sampling = request.sampling
    results: Samples = []
    for index in range(request.samples):
        key = torch.tensor([sample_key(seed, request.prompt.id, request.visit, index)])
        tokens = list(request.prompt.token_ids)
        recorded: list[float] = []
        while len(recorded) < sampling.max_new_tokens and len(tokens) < context:
            logits = logits_of(torch.tensor([history_hash(tokens)]), version)
            log_probs = log_softmax(logits, torch.tensor([sampling.temperature or 1.0]))
            p = [
                torch.tensor([value], dtype=torch.float64)
                for value in (sampling.top_p, sampling.min_p)
            ]
            narrowed = (
                truncate(log_probs, torch.tensor([sampling.top_k]), *p)
                if sampling.truncates
                else log_probs
            )
            token = (
                int(draw(narrowed, key, torch.tensor([len(tokens)])))
                if sampling.temperature
                else int(logits.argmax())
            )
            tokens.append(token)
            recorded.append(float(log_probs[0, token]))
            if token in sampling.stop_token_ids:
                break
        results.append((tokens[len(request.prompt.token_ids) :], recorded))
    return results
