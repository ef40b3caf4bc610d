"""Compare every operation of rollout and training: which rows belong together, whether their bits
are equal, and the first site at which they are not.

Rollout computes rows in ragged steps over pages, training in packed batches.  A prompt is computed
once for many samples in rollout and once for each sample in training, and a preempted sample is
computed again.  So a row is identified by the key of its token, a checksum of the whole prefix, and
all rows of one key must have the same bits:

    checksum(row)   = sum_j bits_j w_j         modulo 2^64, with random 64-bit weights w_j; bits_j
                                               are 32 at once where a row has a multiple of these
    key(t_0 .. t_p) = sum_i (t_i + 1) w_i      a running sum along the sequence

Sums of integers have no order, so both are the same in any batch and on any device.  Two rows that
differ have the same checksum with a probability of about 2^-33 at most (2^-64 times the power of
two that all differences share).

    TokenObserver, ObservedRunner   put a key beside every row; the rollout side keeps the key of
                                    every token in the cache by its slot, and copies keys together
                                    with pages.  A row of logits is known by the bits of the hidden
                                    state that it was computed from
    Checksums                       the rows of one side, by site
    first_difference                the first site at which the rows of a token are not all equal
    Extremes                        the values at one site, to measure by how much they differ

A row without a partner on the other side is a difference too: rollout computed a token behind a
prefix that no sample has, because its pages hold other tokens, or it never computed one that it
should have.  The last token of a sample is computed in training alone, because rollout never needs
its K and V.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch

from isobit.kernels.noise import splitmix64
from isobit.kernels.operands import UNROUNDED, observing
from isobit.models.function import SampledPolicy
from isobit.models.scorer import Scorer
from isobit.precision.quant_tensor import BLOCK, DTYPES, E8M0_BIAS
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.rollout.runner import ForwardBatch, PolicyRunner
from isobit.rollout.sequence import States

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ROW_SEED, _TOKEN_SEED, _SCALE_SEED = 1, 2, 3


def row_checksums(values: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Values [T, ...] of any dtype, and their scales if they are quantised -> int64 [T], on the
    CPU.
    """
    checksums = _weighted_bits(values, _ROW_SEED)
    return checksums if scales is None else checksums + _weighted_bits(scales, _SCALE_SEED)


def token_keys(
    token_ids: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """The key of each token of a ragged batch: a checksum of its prefix, itself included.

    token_ids and positions int64 [T] of pieces laid end to end, counts int64 [B] of each piece,
    before int64 [B]: the key of the token before the piece, 0 at the start of a sequence -> int64
    [T].
    """
    terms = (token_ids + 1) * _weights(positions, _TOKEN_SEED)
    running = terms.cumsum(0)
    starts = counts.cumsum(0) - counts
    return running + (before + terms[starts] - running[starts]).repeat_interleave(counts)


def _weighted_bits(x: torch.Tensor, seed: int) -> torch.Tensor:
    """In as few operations as possible: a proof calls it some ten thousand times."""
    rows = x if x.dim() == 2 else x.unsqueeze(-1).flatten(1)
    if rows.shape[1] * rows.element_size() % 4 == 0:
        bits = rows.contiguous().view(torch.int32)
    else:
        bits = rows.view(_INTEGERS[rows.element_size()])
    weights = _row_weights(bits.shape[1], seed, bits.device)
    return (bits.to(torch.int64) * weights).sum(1).cpu()


@cache
def _row_weights(width: int, seed: int, device: torch.device) -> torch.Tensor:
    return _weights(torch.arange(width, device=device), seed)


def _weights(indices: torch.Tensor, seed: int) -> torch.Tensor:
    return splitmix64(torch.full_like(indices, seed), indices)


LOG_PROB = "log_prob"
HEAD_SITES = ("lm_head", "lm_head.input")  # the second in INT8 alone
_NONE = torch.empty(0, dtype=torch.int64)


class Keep(Protocol):
    """Receives what one operation computed for some tokens."""

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """``keys`` int64 [T], ``values`` [T, ...], and their scales if they are quantised."""
        ...


class TokenObserver:
    """An ``Observer`` that puts a key beside every row."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        """Receives what is seen from now on."""
        self._keys, self._head_keys = _NONE, _NONE
        self._seen: dict[str, int] = {}

    @contextmanager
    def tokens(self, keys: torch.Tensor, head_keys: torch.Tensor = _NONE) -> Iterator[None]:
        """Observe one forward over the tokens ``keys`` int64 [T], with logits for ``head_keys``
        int64 [N].
        """
        self._keys, self._head_keys, self._seen = keys, head_keys, {}
        with observing(self):
            yield

    def __call__(self, name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """An operation that works in chunks of rows is seen once a chunk, in their order."""
        first = self._seen.get(name, 0)
        self._seen[name] = last = first + values.shape[0]
        keys = self._head_keys if name in HEAD_SITES else self._keys
        self.keep(name, keys[first:last], values.cpu(), None if scales is None else scales.cpu())


class ObservedRunner(PolicyRunner):
    """The rollout side of a policy, with every operation observed."""

    def __init__(self, policy: SampledPolicy, num_pages: int, observer: TokenObserver) -> None:
        super().__init__(policy, num_pages)
        self._observer = observer
        self._keys = torch.zeros(num_pages * self.page_tokens, dtype=torch.int64)  # by slot
        self._key_of_hidden: dict[int, int] = {}

    def forward(self, batch: ForwardBatch) -> States:
        keys = self._write_keys(batch)
        with self._observer.tokens(keys):
            states = super().forward(batch)
        checksums = row_checksums(states.hidden).tolist()
        self._key_of_hidden.update(zip(checksums, keys.tolist(), strict=True))
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        keys = torch.tensor([self._key_of_hidden[bits] for bits in row_checksums(hidden).tolist()])
        with self._observer.tokens(_NONE, keys):
            return super().logits(hidden)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        super().copy_pages(sources, targets)
        pages = self._keys.view(-1, self.page_tokens)
        pages[targets] = pages[sources]

    def _write_keys(self, batch: ForwardBatch) -> torch.Tensor:
        """The keys of the new tokens, from their pages and lengths: ``batch.positions`` is among
        what may be wrong.
        """
        paged = batch.paged
        counts, lengths = torch.tensor(paged.counts), torch.tensor(paged.lengths)
        first = lengths - counts
        starts = counts.cumsum(0) - counts
        positions = torch.arange(int(counts.sum())) + (first - starts).repeat_interleave(counts)
        last_cached = (first - 1).clamp(min=0)
        page = paged.block_table.gather(1, (last_cached // self.page_tokens)[:, None])[:, 0]
        before = self._keys[page * self.page_tokens + last_cached % self.page_tokens].masked_fill(
            first == 0, 0
        )
        self._keys[paged.slots] = keys = token_keys(batch.token_ids, positions, counts, before)
        return keys


def observed_scores(
    scorer: Scorer, batch: PackedBatch, rollout: Keep, training: Keep
) -> TokenScores:
    """The training forward of a batch; and the log-probabilities of both sides, the recorded ones
    being in the batch.
    """
    keys = keys_of_batch(batch)
    with TokenObserver(training).tokens(keys, keys[batch.rows]):
        scores = scorer.score(batch)
    predicted = keys[batch.rows + 1]
    rollout(LOG_PROB, predicted, batch.recorded_log_probs, None)
    training(LOG_PROB, predicted, scores.log_probs, None)
    return scores


def keys_of_batch(batch: PackedBatch) -> torch.Tensor:
    """Keys of all tokens of a batch, int64 [T]."""
    lengths = torch.tensor(batch.lengths)
    return token_keys(batch.token_ids, batch.positions, lengths, torch.zeros_like(lengths))


_FORMATS = {dtype: name.upper() for name, dtype in DTYPES.items()} | {torch.int32: "INT32"}
_SMALLEST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@dataclass(slots=True)
class Rows:
    """What one side computed at one site: the format, and a key and a checksum for each row, as
    many times as it was computed.
    """

    format: str
    keys: list[torch.Tensor] = field(default_factory=list)
    checksums: list[torch.Tensor] = field(default_factory=list)


class Checksums:
    """A ``Keep`` for one side; ``sites`` are in the order in which they were first seen, that of
    the forward pass.
    """

    def __init__(self) -> None:
        self.sites: dict[str, Rows] = {}

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        rows = self.sites.setdefault(name, Rows(_FORMATS[values.dtype]))
        rows.keys.append(keys)
        rows.checksums.append(row_checksums(values, scales))


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """A site where the sides differ."""

    site: str
    sites_before: int
    """Sites before it in the forward pass, which are all equal."""
    formats: Mapping[str, str]
    """Formats of the result, by side."""
    tokens_compared: int
    differing: torch.Tensor
    """Keys of the tokens that differ, int64, ascending."""
    unstable: Mapping[str, int]
    """By side, how many tokens it computed more than once with different bits."""
    alone: Mapping[str, torch.Tensor]
    """By side, keys of the tokens that the other side should have rows of and lacks."""

    @property
    def lacks_rows(self) -> bool:
        return any(keys.numel() for keys in self.alone.values())


def first_difference(
    rollout: Checksums, training: Checksums, last_tokens: torch.Tensor
) -> SiteDifference | None:
    """The first site in the order of the forward pass at which a token's rows are not all equal, or
    at which a side lacks rows, if any is; ``last_tokens`` are keys of those that rollout need not
    compute.
    """
    for index, (site, rows) in enumerate(training.sites.items()):
        theirs = rollout.sites.get(site, Rows(rows.format, [_NONE], [_NONE]))
        found = _difference(site, index, theirs, rows, last_tokens)
        if found.differing.numel() or found.lacks_rows:
            return found
    return None


def _difference(
    site: str, sites_before: int, rollout: Rows, training: Rows, last_tokens: torch.Tensor
) -> SiteDifference:
    on_rollout, on_training = torch.cat(rollout.keys), torch.cat(training.keys)
    checksums = {"rollout": torch.cat(rollout.checksums), "training": torch.cat(training.checksums)}
    tokens, index = torch.unique(torch.cat([on_rollout, on_training]), return_inverse=True)
    parts = dict(
        zip(checksums, index.split([on_rollout.numel(), on_training.numel()]), strict=True)
    )
    has = {
        side: torch.zeros(tokens.numel(), dtype=torch.bool).index_fill_(0, part, True)
        for side, part in parts.items()
    }
    shared = has["rollout"] & has["training"]
    differing = shared & _disagree(index, torch.cat(list(checksums.values())), tokens.numel())
    if rollout.format != training.format:
        differing = shared
    unstable = {
        side: int(_disagree(parts[side], checksums[side], tokens.numel()).sum())
        for side in checksums
    }
    formats = {"rollout": rollout.format, "training": training.format}
    without_rollout = tokens[~has["rollout"]]
    alone = {
        "rollout": tokens[~has["training"]],
        "training": without_rollout[~torch.isin(without_rollout, last_tokens)],
    }
    if site in HEAD_SITES:  # its rows are known by bits, which two tokens may share
        alone = dict.fromkeys(alone, _NONE)
    return SiteDifference(
        site, sites_before, formats, int(shared.sum()), tokens[differing], unstable, alone
    )


def _disagree(index: torch.Tensor, checksums: torch.Tensor, count: int) -> torch.Tensor:
    """bool [count]: whether the checksums of an index are not all the same."""
    low = torch.full((count,), _LARGEST).scatter_reduce_(0, index, checksums, "amin")
    high = torch.full((count,), _SMALLEST).scatter_reduce_(0, index, checksums, "amax")
    return low < high


class Extremes:
    """A ``Keep`` for both sides: the smallest and the largest value at each place of one site's
    rows, for some tokens.
    """

    def __init__(self, site: str, tokens: torch.Tensor) -> None:
        self._site, self._tokens = site, tokens
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        wanted = torch.isin(keys, self._tokens)
        if name != self._site or not bool(wanted.any()):
            return
        rows = dequantise(values, scales).cpu()[wanted]
        at = torch.searchsorted(self._tokens, keys[wanted])[:, None].expand_as(rows)
        if self._low is None or self._high is None:
            self._low = torch.full((self._tokens.numel(), rows.shape[1]), torch.inf)
            self._high = -self._low
        self._low.scatter_reduce_(0, at, rows, "amin")
        self._high.scatter_reduce_(0, at, rows, "amax")

    @property
    def max_abs_diff(self) -> float | None:
        """The largest difference between two rows of a token; None if no two rows differ in a
        finite number.
        """
        if self._low is None or self._high is None:
            return None
        spread = self._high - self._low
        finite = spread[torch.isfinite(spread)]
        return float(finite.max()) if finite.numel() and float(finite.max()) > 0 else None


def dequantise(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """FP32 [T, K]: what the rows stand for, of INT8 before the product with the Hadamard matrix is
    undone.
    """
    if scales is None:
        return values.float().unsqueeze(-1).flatten(1)
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - E8M0_BIAS)
    if scales.ndim == values.ndim - 1:  # one a row, or one a token and head
        return (values.float() * scales[..., None]).flatten(1)
    of_columns = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * of_columns


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one scenario that were compared."""

    sites: int
    """Results of operations; one before its rounding counts separately."""
    rows: int
    """Checksums compared, of both sides."""
    difference: SiteDifference | None
    """The first site that differs, in the order of the forward pass."""

    def as_json(self) -> dict[str, Any]:
        """The counts, and the name of the first site that differs."""
        found = self.difference
        return {
            "sites": self.sites,
            "rows": self.rows,
            "first_difference": None if found is None else found.site,
        }


def compared_operations(
    rollout: Checksums, training: Checksums, samples: Sequence[TokenSequence]
) -> Operations:
    """Compare both sides of the scenario that generated ``samples``."""
    rows = sum(
        checksums.numel()
        for side in (rollout, training)
        for site in side.sites.values()
        for checksums in site.checksums
    )
    found = first_difference(rollout, training, _last_tokens(samples))
    return Operations(len(training.sites), rows, found)


def describe_site(site: str) -> str:
    """``layers.0.o_proj.unrounded`` -> ``layers.0.o_proj, before its rounding``."""
    rounded = site.removesuffix(f".{UNROUNDED}")
    return site if rounded == site else f"{rounded}, before its rounding"


def _last_tokens(samples: Sequence[TokenSequence]) -> torch.Tensor:
    return torch.tensor(
        [int(keys_of_batch(batch)[-1]) for sample in samples for batch in pack([sample], 1)]
    )
