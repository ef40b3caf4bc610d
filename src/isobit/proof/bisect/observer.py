"""Which token each observed row belongs to, on both sides.

Rollout rows come in ragged steps over pages, training rows in packed batches; the same prompt is
computed once for many samples there and once for each here; a preempted sample is computed again.
So a row goes by its token's key, the checksum of the whole prefix
(``isobit.proof.bisect.checksums``): all rows with one key must have the same bits.

The rollout side keeps the key of every token of the cache by its slot, and copies keys as pages are
copied.  A row of logits is known by the bits of the hidden state that it was computed from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from isobit.kernels.trace import observing
from isobit.models.policy_share import SampledPolicy
from isobit.models.scorer import Scorer
from isobit.proof.bisect.checksums import row_checksums, token_keys
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores
from isobit.rollout.native.batch import ForwardBatch
from isobit.rollout.native.runner import PolicyRunner
from isobit.rollout.native.states import States

LOG_PROB = "log_prob"
HEAD = "lm_head"
_NONE = torch.empty(0, dtype=torch.int64)


class Keep(Protocol):
    """Takes what one operation made for some tokens."""

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """``keys`` int64 [T], ``values`` [T, ...], and their scales if they are quantised."""
        ...


class TokenObserver:
    """An ``Observer`` that puts a key beside every row."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
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
        keys = self._head_keys if name == HEAD else self._keys
        self._keep(name, keys[first:last], values.cpu(), None if scales is None else scales.cpu())


class ObservedRunner(PolicyRunner):
    """The rollout side of a policy, observed."""

    def __init__(self, policy: SampledPolicy, num_pages: int, observer: TokenObserver) -> None:
        super().__init__(policy, num_pages)
        self._observer = observer
        self._keys = torch.zeros(num_pages * self.page_tokens, dtype=torch.int64)  # by slot
        self._key_of_hidden: dict[int, int] = {}

    def forward(self, batch: ForwardBatch) -> States:
        """As ``PolicyRunner.forward``."""
        keys = self._write_keys(batch)
        with self._observer.tokens(keys):
            states = super().forward(batch)
        checksums = row_checksums(states.hidden).tolist()
        self._key_of_hidden.update(zip(checksums, keys.tolist(), strict=True))
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``PolicyRunner.logits``."""
        keys = torch.tensor([self._key_of_hidden[bits] for bits in row_checksums(hidden).tolist()])
        with self._observer.tokens(_NONE, keys):
            return super().logits(hidden)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """As ``PolicyRunner.copy_pages``, and the keys with them."""
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
    """Of all its tokens, int64 [T]."""
    lengths = torch.tensor(batch.lengths)
    return token_keys(batch.token_ids, batch.positions, lengths, torch.zeros_like(lengths))
