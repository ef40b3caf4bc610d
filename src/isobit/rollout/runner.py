"""The engine's only view of the model, in two forms, each with its KV cache.

``ModelRunner`` gives back what it computes: states of tokens, logits. ``PipelineRunner`` draws
tokens itself and goes on from them, so that the host learns of them while the device computes the
next. ``PolicyRunner`` is the policy's rollout side as a ModelRunner;
``isobit.rollout.graph_runner`` is the other one, for an asynchronous device. The tests' models
stand in the same places.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.operands import Attend, Drawn, Draws, KvCache, PagedBatch
from isobit.memory.cache_size import CacheSize, pages_for
from isobit.models.function import SampledPolicy
from isobit.rollout.reservations import PageStore
from isobit.rollout.scheduler import Plan
from isobit.rollout.sequence import Sample, States


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of a forward: T new tokens of B sequences laid end to end."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], from 0 in each sequence."""
    paged: PagedBatch
    adapter: str | None = None
    """The adapter of all B sequences (``Request.adapter``); None for the policy as it is."""


def carries_of(plan: Plan) -> Tensor | None:
    """``PagedBatch.carries`` of the plan's sequences; None of a model without delta rules."""
    found = [sequence.carries(count) for sequence, count in plan]
    if all(written < 0 for _, written in found):
        return None
    return torch.tensor(found).t()


def build_batch(plan: Plan, page_tokens: int) -> ForwardBatch:
    """The tensors of ``plan``.  Every sequence of it has pages, of ``page_tokens`` tokens, for the
    tokens it puts in; all have one adapter.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for sequence, count in plan:
        first, pages = sequence.cached, sequence.pages
        if count == 1:  # most sequences of most steps
            token_ids.append(sequence.tokens[first])
            positions.append(first)
            slots.append(pages[first // page_tokens] * page_tokens + first % page_tokens)
            continue
        chunk = range(first, first + count)
        token_ids += [*sequence.tokens[first : first + count], *sequence.draft]
        positions += chunk
        slots += [
            pages[position // page_tokens] * page_tokens + position % page_tokens
            for position in chunk
        ]
    lengths = tuple([sequence.cached + count for sequence, count in plan])
    width = pages_for(max(lengths), page_tokens)
    block_table = torch.from_numpy(np.stack([sequence.block_row[:width] for sequence, _ in plan]))
    paged = PagedBatch(
        tuple([count for _, count in plan]),
        lengths,
        block_table,
        torch.tensor(slots),
        carries_of(plan),
    )
    (adapter,) = {sequence.adapter for sequence, _ in plan}
    return ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), paged, adapter)


class ModelRunner(PageStore, Protocol):
    """One model with its KV cache."""

    @property
    def version(self) -> int:
        """The version of the weights; K and V computed under another one are worthless."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of its cache."""
        ...

    def forward(self, batch: ForwardBatch) -> States:
        """Write the new tokens' K and V into their slots; what it leaves of the T tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [N, V] from [N, hidden]."""
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Drawn:
        """The next tokens of samples, from FP32 logits [R, V]; ``draws`` are on the host."""
        ...

    def clear(self) -> None:
        """Forget everything in the cache, non-finite numbers included."""
        ...


class PendingTokens(Protocol):
    """The tokens that one step draws, on their way to the host."""

    def wait(self) -> Iterable["DrawnToken"]:
        """Wait for the tokens, which come in the order of drawing.

        A log-probability that is not finite says that the logits were not.  Called once, and in the
        order of the steps.
        """
        ...


class DrawnToken(NamedTuple):
    """A sample's next token."""

    sample: Sample
    token_id: int
    log_prob: float
    truncated_log_prob: float | None = None
    """The log-probability under the truncated distribution; None without a filter."""
    routing: int | None = None
    """The digest of the experts at the row that it was drawn from; None without experts."""


@runtime_checkable
class PipelineRunner(PageStore, Protocol):
    """One model with its KV cache, and the newest token of each sample that it has drawn for.

    Nothing here waits for the device: calls take effect in their order.  The token that ``decode``
    and ``draw`` draw stands at position ``sample.length``, as it is during the call; K and V are
    written from position ``cached`` on, through ``pages``, both as they are during the call.  From
    the first call with a sample until it is forgotten, its pages only grow at the end.
    """

    @property
    def version(self) -> int:
        """The version of the weights; K and V computed under another one are worthless."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of its cache."""
        ...

    def decode(self, samples: Sequence[Sample]) -> None:
        """Put each sample's newest token, drawn here, and its guesses through the model, and draw a
        token from each of these rows; all have one adapter. A sample goes on from the token behind
        its last guess that was drawn; there are guesses only where no token is in flight.
        """
        ...

    @property
    def captures(self) -> int:
        """See ``isobit.rollout.drafts.StepTimes``."""
        ...

    def step_seconds(self, rows: int, length: int) -> float:
        """See ``isobit.rollout.drafts.StepTimes``; guesses are among the rows."""
        ...

    def now(self) -> float:
        """See ``isobit.rollout.drafts.StepTimes``."""
        ...

    def prefill(self, plan: Plan) -> States:
        """Put tokens that the host knows through the model; what it leaves of each chunk's last
        token.  All have one adapter.
        """
        ...

    def draw(self, ready: Sequence[tuple[Sample, States]]) -> None:
        """Draw the next token of each sample from the state of its last; samples of one prompt may
        share one.
        """
        ...

    def end_step(self) -> PendingTokens:
        """The tokens drawn since the last call. At most one step has not been waited for when the
        next one begins.
        """
        ...

    def forget(self, samples: Sequence[Sample]) -> None:
        """These samples have ended or lost their pages.  Some may never have been drawn for; some
        may be in a step not waited for.
        """
        ...

    def clear(self) -> None:
        """Forget all samples, all tokens and everything in the cache, non-finite numbers
        included.
        """
        ...


class PolicyRunner:
    """The rollout side of a policy, one forward at a time: the engine's way where a back end
    computes at once, and elsewhere the way to observe it.
    """

    def __init__(self, policy: SampledPolicy, size: CacheSize) -> None:
        self._policy, self._backend = policy, policy.backend
        self._cache = empty_cache(policy, size)
        self.page_tokens = self._cache.page_tokens

    @property
    def version(self) -> int:
        """The policy's count of publications."""
        return self._policy.version

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> States:
        """The states of T new tokens, whose K and V go into the cache."""
        token_ids, positions = map(self._backend.to_device, (batch.token_ids, batch.positions))
        attend = self._backend.paged_attention(self._cache, batch.paged, positions)
        return rollout_states(self._policy, token_ids, attend, batch.adapter)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [N, V] from [N, hidden]."""
        return self._policy.decoder.lm_head.logits(self._policy.weights("rollout"), hidden)

    def draw(self, logits: Tensor, draws: Draws) -> Drawn:
        """The next tokens of samples, from FP32 logits [R, V]."""
        return self._backend.draw(logits, draws.map(self._backend.to_device))

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages of all layers."""
        self._cache.copy_pages(sources, targets)

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        """Copy carries of all layers."""
        self._cache.copy_carries(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        """Set pages of all layers to zero."""
        self._cache.clear_pages(pages)

    def clear(self) -> None:
        """Start over with an empty cache."""
        self._cache.clear()


def empty_cache(policy: SampledPolicy, size: CacheSize) -> KvCache:
    """Pages for the KV heads of a policy that this process has, and carries."""
    shape = policy.weights("rollout").tensor_parallel.share(policy.config)
    return policy.backend.kv_cache(shape, policy.flow, size.pages, size.carries)


def rollout_states(
    policy: SampledPolicy, token_ids: Tensor, attend: Attend, adapter: str | None = None
) -> States:
    """A forward of the rollout side, or of one of the policy's ``adapters``: int64 [T] on its
    device.
    """
    decoder, weights = policy.decoder, policy.weights("rollout")
    if adapter is not None:
        adapted = policy.adapters[adapter]
        decoder, weights = adapted.decoder, adapted.weights
    routes = decoder.routes()
    hidden = decoder.hidden_states(weights, token_ids, attend, routes)
    return States(hidden, None if routes is None else routes.digests())


def page_tokens_of(policy: SampledPolicy) -> int:
    """Tokens of a page of a policy's cache: a KV tile of its back end's attention."""
    return policy.backend.sizes.page_tokens
