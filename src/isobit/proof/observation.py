"""Every operation of rollout and training, observed, with a key for each row.

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

The rollout side keeps the key of every token in the cache by its slot, and copies keys together
with pages.  A row of logits is known by the bits of the hidden state that it was computed from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

from isobit.kernels.noise import splitmix64
from isobit.kernels.observing import observing
from isobit.memory.cache_size import CacheSize
from isobit.models.function import SampledPolicy
from isobit.models.scorer import Scorer
from isobit.records.batch import PackedBatch, TokenScores
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
    """A checksum of each row, int64 [T], in as few operations as possible: a proof calls it some
    ten thousand times.
    """
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


NO_KEYS = torch.empty(0, dtype=torch.int64)


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
        self._keys, self._head_keys = NO_KEYS, NO_KEYS
        self._seen: dict[str, int] = {}

    @contextmanager
    def tokens(self, keys: torch.Tensor, head_keys: torch.Tensor = NO_KEYS) -> Iterator[None]:
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

    def __init__(self, policy: SampledPolicy, size: CacheSize, observer: TokenObserver) -> None:
        super().__init__(policy, size)
        self._observer = observer
        self._keys = torch.zeros(size.pages * self.page_tokens, dtype=torch.int64)  # by slot
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
        with self._observer.tokens(NO_KEYS, keys):
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
