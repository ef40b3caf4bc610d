"""The trainer: one update from micro-batches, and the weights it publishes.

    for each micro-batch   forward, objective, backward       gradients add up in FP32
    then                   norm, clip, AdamW, publish         or nothing at all, if loss or norm
                                                              is not finite

Of W processes each computes one micro-batch of a round (``isobit.training.rounds``), and owns some
rows of every master: their gradient, moments and update (``isobit.parallel``).  The micro-batches,
their order and every sum are those of one process, and so are the bits.  After each forward the
ranks agree: on figures, on a loss that is not finite, on a rank that ran out of memory.

A mixture of experts adds its router's own losses to the objective's
(``isobit.training.comparison``).

An update that is not finite leaves masters, optimiser state and published weights as they were.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from isobit.algorithms.objective import Objective
from isobit.config.training import TrainingConfig
from isobit.models.decoder import VALUE_HEAD
from isobit.models.function import LogProbFunction, function_of
from isobit.models.mlp import RouterCoefficients
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.models.teacher import Teacher
from isobit.parallel.world import raised_on_all, run_and_gather, run_on_all
from isobit.records.batch import PackedBatch
from isobit.records.metrics import Metrics
from isobit.training.budget import MicrobatchBudget
from isobit.training.comparison import (
    Comparison,
    UpdateMetrics,
    UpdateTotals,
    router_coefficients,
)
from isobit.training.optimiser import (
    build_optimiser,
    clip_gradients,
    gradient_norm,
    learning_rate,
)
from isobit.training.repeat import Pass, Repeat, compare_passes, digest_of, figures_text
from isobit.training.rounds import Rounds
from isobit.util.clock import Timing, untimed
from isobit.util.errors import NonFiniteError

_LARGEST_NORM = torch.finfo(torch.float32).max
"""Gradients are clipped in FP32, where a larger norm, which FP64 still holds, would make zeros of
them.
"""


class Trainer:
    """Trains a policy in place: ``policy.masters`` change, ``policy.publish`` makes both sides read
    the new weights.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        total_updates: int,
        seed: int = 0,
        timing: Timing = untimed,
        head_rate: float = 1.0,
        teacher: Teacher | None = None,
    ) -> None:
        """``total_updates`` is the number of optimiser steps of the whole run: the length of the
        schedule; ``seed`` is the run's.  ``timing`` is told of an update's phases: backward (with
        the loss, and interrupted by each forward), optimiser, and publish within it.  A value head
        learns ``head_rate`` times as fast as the rest.  With a ``teacher`` the objective is given
        the divergences from it.
        """
        assert policy.slots.count == config.slots, "the policy adds up in other slots"
        self.timing = timing
        self.policy, self.teacher = policy, teacher
        self.scorer = Scorer(policy)
        """Log-probabilities by the training forward, without learning from them."""
        self.config = config
        self.total_updates = total_updates
        head = f"{VALUE_HEAD}.weight"
        first_rows = {name: policy.rows(name).start for name in policy.masters}
        self._optimiser = build_optimiser(
            policy.masters, config, policy.backend, seed, head, head_rate, first_rows
        )
        self.updates = 0
        """Updates taken, skipped or passed over so far."""
        self.budget = MicrobatchBudget(config.tokens_per_microbatch)
        self._skipped_in_a_row = 0
        self.is_whole = True
        """False from an update's first change of a master to its publication, and for ever
        if it was cut off there.
        """

    @property
    def function(self) -> LogProbFunction:
        """What the log-probabilities of its forward are values of."""
        return function_of(self.policy, "training")

    def counters(self) -> dict[str, int]:
        """The state of the schedule and the count of skipped updates, for ``restore``."""
        return {"updates": self.updates, "skipped_in_a_row": self._skipped_in_a_row}

    def moments(self) -> dict[str, torch.Tensor]:
        """AdamW's state, empty before the first update.

        ``MASTER.exp_avg`` and ``MASTER.exp_avg_sq`` (shaped as the master), ``MASTER.step``, and
        for 8-bit moments ``MASTER.exp_avg_scale`` and ``MASTER.exp_avg_sq_scale``.
        """
        state = self._optimiser.state
        return {
            f"{name}.{kind}": value
            for name, master in self.policy.masters.items()
            for kind, value in state.get(master, {}).items()
        }

    def restore(self, counters: Mapping[str, int], moments: Mapping[str, torch.Tensor]) -> None:
        """Continue where ``counters`` and ``moments`` were taken; the masters are the policy's to
        restore.
        """
        self.updates, self._skipped_in_a_row = counters["updates"], counters["skipped_in_a_row"]
        self._optimiser.state.clear()
        for key, value in moments.items():
            name, _, kind = key.rpartition(".")
            master = self.policy.masters[name]
            device = "cpu" if kind == "step" else master.device
            self._optimiser.state.setdefault(master, {})[kind] = value.to(device, copy=True)

    def update(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        compare: bool = False,
        inspect: Callable[[Comparison, Metrics], None] | None = None,
    ) -> UpdateMetrics:
        """One update over all micro-batches together, by all ranks together.

        ``compare`` counts recorded log-probabilities that differ from this forward's, but for what
        is replayed; ``inspect`` is called with that comparison and the mismatch before a weight
        changes, and none does where it raises.  Raises NonFiniteError if a log-probability is not
        finite, or if too many updates in a row had to be skipped, and as
        ``UpdateTotals.rate_factor``.
        """
        assert batches, "an update needs at least one micro-batch"
        rate = learning_rate(self.updates, self.config, self.total_updates)
        totals = UpdateTotals(compare)
        try:
            with self.timing("backward"):
                norm, problem = self._gradients(batches, objective, totals)
            rate *= totals.rate_factor() if self.config.rate_by_ess else 1.0
            comparison, mismatch = totals.compared.comparison(), totals.compared.mismatch()
            if compare and inspect is not None:
                inspect(comparison, mismatch)
            if problem is None:
                with self.timing("optimiser"):
                    self._step(norm, rate)
        finally:
            self._optimiser.drop_gradients()
            self.policy.gradient.release()
            if self.policy.kv_scales is not None:
                self.policy.kv_scales.forget_learnt()
        self.updates += 1
        self._count_skip(problem)
        changed = 0.0 if problem else self.policy.change.share
        metrics = totals.metrics(norm, rate, changed)
        return UpdateMetrics(metrics, totals.tokens, comparison, mismatch, problem)

    def pass_over(self) -> None:
        """Leave out an update that has nothing to learn from: only the schedule goes on."""
        self.updates += 1

    def repeat(self, batches: Sequence[PackedBatch], objective: Objective, pick: int) -> Repeat:
        """Compute one micro-batch of an update twice, or one on each rank, and compare the bits;
        ``pick`` says from which on, modulo their number.  Nothing is learnt from it.
        """
        policy = self.policy
        router, shares = router_coefficients(self.config, batches), objective.shares(batches)
        members = list(zip(batches, shares, strict=True))
        first = pick % max(1, len(members) - policy.world.size + 1)
        chosen = members[first : first + policy.world.size]

        def compute() -> Pass:
            rounds = self._rounds(objective, router, compare=True, timing=untimed)
            try:
                figures = figures_text(rounds.figures(chosen))
                by_rank = run_and_gather(policy.world, partial(_digests, policy, rounds))
            finally:
                self._optimiser.drop_gradients()
                policy.gradient.release()
            return figures, {
                name: " ".join(one[name] for one in by_rank) for name in policy.masters
            }

        return compare_passes(compute)

    def _rounds(
        self, objective: Objective, router: RouterCoefficients, compare: bool, timing: Timing
    ) -> Rounds:
        recompute = self.config.recompute
        return Rounds(self.policy, objective, recompute, router, compare, timing, self.teacher)

    def _gradients(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        totals: UpdateTotals,
    ) -> tuple[float, str | None]:
        """Leave the update's gradients in the masters; -> their norm, and what is not finite, if
        anything is.
        """
        world = self.policy.world
        router, shares = router_coefficients(self.config, batches), objective.shares(batches)
        rounds = self._rounds(objective, router, totals.compare, self.timing)
        figures = rounds.figures(list(zip(batches, shares, strict=True)))
        for batch, of_batch in zip(batches, figures, strict=False):
            totals.add(batch, of_batch)
            if not math.isfinite(of_batch["loss"]):
                return math.nan, f"the loss is {of_batch['loss']}"
        squares = run_and_gather(world, rounds.squares)
        norm = gradient_norm(square for of_rank in squares for square in of_rank)
        return norm, None if norm <= _LARGEST_NORM else self._what_is_not_finite(norm)

    def _what_is_not_finite(self, norm: float) -> str:
        """The master nearest to the loss whose gradient holds a NaN or an infinity: the backward
        goes from there to all before it.
        """
        indices = run_and_gather(
            self.policy.world,
            lambda: [
                index
                for index, master in enumerate(self.policy.masters.values())
                if master.grad is not None and not torch.isfinite(master.grad).all()
            ],
        )
        damaged = [index for of_rank in indices for index in of_rank]
        if not damaged:
            return f"the gradient norm is {norm}"
        return f"the gradient of {list(self.policy.masters)[max(damaged)]} is not finite"

    def _step(self, norm: float, rate: float) -> None:
        clip_gradients(self._optimiser, norm, self.config.max_grad_norm)
        self._optimiser.learning_rate = rate
        self.is_whole = False
        run_on_all(self.policy.world, self._optimiser.step)
        with self.timing("publish"):
            self.policy.publish()
        self.is_whole = True

    def _count_skip(self, problem: str | None) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if problem else 0
        if problem and self._skipped_in_a_row >= self.config.max_skipped_updates:
            reason = (
                f"{self._skipped_in_a_row} updates in a row were skipped, the last because "
                f"{problem}; "
                f"training.max_skipped_updates is {self.config.max_skipped_updates}. The weights "
                "are those of the last good one: "
                "lower the learning rate, or look for what is not finite in rewards or weights"
            )
            raise raised_on_all(NonFiniteError(reason))


def _digests(policy: Policy, rounds: Rounds) -> dict[str, str]:
    """Digests of the rows of every gradient that this rank owns, once the rounds are over."""
    rounds.squares()
    return {
        name: "" if master.grad is None else digest_of(master.grad)
        for name, master in policy.masters.items()
    }
