"""The micro-batches of an update, as one rank computes its own: forward and objective, then the
backward, in each round.

The objective runs on the host, on any device: it takes a few numbers a token, and what it reports
is wanted there.

The forward may fail on one rank alone, and the ranks agree on that right after it.  What fails in a
backward is kept until they next agree: the others wait for this rank's gradients, so it sends them
what it has, which then counts for nothing.

With several slots (``isobit.parallel.gradient_sum``) the ranks of a host compute the rounds of a
slot, and agree with the other hosts at its end.  Then every micro-batch is computed, even after a
loss that is not finite: which ones had been by then would depend on the number of ranks and hosts.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from isobit.algorithms.objective import Objective, Shares
from isobit.config.training import Recompute
from isobit.models.mlp import RouterCoefficients
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass
from isobit.models.teacher import Teacher
from isobit.parallel.gradient_sum import SlotSum
from isobit.parallel.world import World, run_and_gather
from isobit.records.batch import PackedBatch, TokenScores
from isobit.training.comparison import (
    microbatch_figures,
)
from isobit.util.clock import Timing

Member = tuple[PackedBatch, Shares]
"""A micro-batch, and its shares of the update."""


class Rounds:
    """The rounds of one update, on one rank."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        recompute: Recompute,
        router: RouterCoefficients,
        compare: bool,
        timing: Timing,
        teacher: Teacher | None = None,
    ) -> None:
        self._policy = policy
        self._objective = objective
        self._teacher = teacher
        self._recompute: Recompute = recompute
        self._router = router
        self._compare = compare
        self._timing = timing
        self._scored: ScoredPass | None = None
        self._loss: torch.Tensor | None = None
        self._leaves: list[torch.Tensor | None] = []
        self._failure: Exception | None = None

    def figures(self, members: Sequence[Member]) -> list[dict[str, Any]]:
        """The figures of all micro-batches of the update in their order, whose gradients are added
        up; with one slot, of those up to the first round with a loss that is not finite.
        """
        gradient = self._policy.gradient
        if isinstance(gradient, SlotSum):
            return self._slot_by_slot(members, gradient)
        return self._fold(members, self._policy.world, stops=True)

    def _slot_by_slot(self, members: Sequence[Member], gradient: SlotSum) -> list[dict[str, Any]]:
        slots, world = gradient.slots, self._policy.world
        figures: list[dict[str, Any]] = [{} for _ in members]
        for first in range(0, slots.count, slots.hosts):
            own = members[first + gradient.host :: slots.count]
            by_rank = run_and_gather(world, partial(self._slot, own, gradient))
            for host in range(slots.hosts):
                of_host = by_rank[host * gradient.group.size]
                figures[first + host :: slots.count] = of_host
            gradient.add_slots()
        return figures

    def _slot(self, members: Sequence[Member], gradient: SlotSum) -> list[dict[str, Any]]:
        """The figures of a slot, on the first rank that computes it."""
        gradient.begin_slot()
        figures = self._fold(members, gradient.group, stops=False)
        self.check()
        return figures if gradient.group.rank == 0 else []

    def _fold(self, members: Sequence[Member], group: World, stops: bool) -> list[dict[str, Any]]:
        """The figures of micro-batches that some ranks compute in rounds; if it ``stops``, to the
        first round with a loss that is not finite.
        """
        figures: list[dict[str, Any]] = []
        for begin in range(0, len(members), group.size):
            active = min(group.size, len(members) - begin)
            own = members[begin + group.rank] if group.rank < active else None
            by_rank = run_and_gather(group, partial(self.forward, own, active))[:active]
            figures += by_rank
            if stops and not all(math.isfinite(one["loss"]) for one in by_rank):
                break
            self.backward()
        return figures

    def forward(self, own: Member | None, active: int) -> dict[str, Any] | None:
        """The figures of this rank's micro-batch in a round of so many; None where it has none.
        Raises what failed in the backward of the round before.
        """
        self.check()
        self._policy.world.pulse.beat()
        self._policy.gradient.begin_round(active)
        if own is None:
            return None
        batch, shares = own
        self._scored = ScoredPass(self._policy, batch, self._recompute, self._router, self._teacher)
        with self._timing("forward"):
            scores = self._scored.forward()
        self._leaves = _leaves(scores)
        outputs = self._objective.loss(scores, batch, shares)
        self._loss = outputs.loss
        return microbatch_figures(scores, outputs, self._compare)

    def backward(self) -> None:
        """Add up the gradients of the round."""
        scored = self._scored
        loss = self._loss
        leaves = self._leaves
        self._scored = None
        self._loss = None
        self._leaves = []
        try:
            if scored is not None and loss is not None:
                present = [leaf for leaf in leaves if leaf is not None]
                gradients = iter(torch.autograd.grad(loss, present, allow_unused=True))
                scored.backward(*(None if leaf is None else next(gradients) for leaf in leaves))
        except Exception as error:  # whatever it is, the others wait for the rest of the round
            self._failure = error
        self._policy.gradient.end_round()

    def check(self) -> None:
        """Raise what failed in a backward."""
        if self._failure is not None:
            raise self._failure

    def squares(self) -> list[float]:
        """Sums of the squares of this rank's gradients, once the last round is over; raises as
        ``check`` does.
        """
        self.check()
        self._policy.gradient.finish()
        masters = self._policy.masters.values()
        grads = [master.grad for master in masters if master.grad is not None]
        return self._policy.backend.gradient_squares(grads)


def _leaves(scores: TokenScores) -> list[torch.Tensor | None]:
    """The outputs that a loss may depend on, in the order of ``ScoredPass.backward``."""
    outputs = (scores.log_probs, scores.entropies, scores.values, scores.divergences)
    return [None if output is None else output.requires_grad_() for output in outputs]
