"""The trainer: one update from micro-batches, and the weights it publishes.

    for each micro-batch   forward, objective, backward       gradients add up in FP32
    then                   norm, clip, AdamW, publish         or nothing at all, if loss or norm
                                                              is not finite

Of W processes each computes one micro-batch of a round, and owns some rows of every master: their
gradient, moments and update (``isobit.parallel``).  The micro-batches, their order and every sum
are those of one process, and so are the bits.  After each forward the ranks agree: on figures, on a
loss that is not finite, on a rank that ran out of memory.

A mixture of experts adds its router's own losses to the objective's
(``isobit.training.comparison``).

An update that is not finite leaves masters, optimiser state and published weights as they were.

The objective runs on the host, on any device: it takes a few numbers a token, and what it reports
is wanted there.

A micro-batch computed twice: forward and backward must give the same bits again.

They repeat for the same call on any device, so that a second pass that differs needs no threshold
to be a fault: of the processor, of the memory, or of a kernel that races.  What is compared are the
micro-batch's figures, its log-probabilities, and a digest of every master's gradient
(``isobit.models.safetensors``).

A fault that strikes alike in both passes (a wrong weight, a kernel that is wrong by rule) repeats,
and is not seen here.

The micro-batches of an update, as one rank computes its own: forward and objective, then the
backward, in each round.

The forward may fail on one rank alone, and the ranks agree on that right after it.  What fails in a
backward is kept until they next agree: the others wait for this rank's gradients, so it sends them
what it has, which then counts for nothing.

With several slots (``isobit.parallel.gradient_sum``) the ranks of a host compute the rounds of a
slot, and agree with the other hosts at its end.  Then every micro-batch is computed, even after a
loss that is not finite: which ones had been by then would depend on the number of ranks and hosts.

Tokens a micro-batch, by update: the setting, unless an out-of-memory has lowered it for the rest
of the run.

The cut into micro-batches decides the order in which gradients add up, and with it their bits.
Each change is therefore kept with the update that it was made for, and a resumed run makes it at
that update again, whether it would run out of memory there or not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isobit.algorithms.objective import Objective, Shares
from isobit.config.training import Recompute, TrainingConfig
from isobit.models.decoder import VALUE_HEAD
from isobit.models.mlp import RouterCoefficients
from isobit.models.policy import Policy
from isobit.models.policy_share import LogProbFunction, function_of
from isobit.models.safetensors import checksum_of
from isobit.models.scorer import ScoredPass, Scorer, Teacher
from isobit.parallel.gradient_sum import SlotSum
from isobit.parallel.world import World, raised_on_all, run_and_gather, run_on_all
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.metrics import Metrics
from isobit.training.comparison import (
    Comparison,
    UpdateMetrics,
    UpdateTotals,
    microbatch_figures,
    router_coefficients,
)
from isobit.training.optimiser import build_optimiser, clip_gradients, gradient_norm, learning_rate
from isobit.util.errors import NonFiniteError
from isobit.util.terminal import Timing, untimed

FORWARD = "forward"

Pass = tuple[str, dict[str, str]]
"""Of one pass: its figures, and a digest of each gradient."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """What came of it."""

    gradients: int
    """Compared."""
    differing: tuple[str, ...]
    """``forward``, where the figures were others, and the masters whose gradients were."""


def compare_passes(compute: Callable[[], Pass]) -> Repeat:
    """Compute twice, and compare."""
    (first, gradients), (second, again) = compute(), compute()
    parted = tuple(name for name, digest in gradients.items() if again[name] != digest)
    return Repeat(len(gradients), ((FORWARD,) if first != second else ()) + parted)


def figures_text(figures: Sequence[Mapping[str, Any]]) -> str:
    """The figures of micro-batches, equal only for equal bits."""
    return repr(
        [
            {
                name: digest_of(value) if isinstance(value, torch.Tensor) else value
                for name, value in made.items()
            }
            for made in figures
        ]
    )


def digest_of(x: torch.Tensor) -> str:
    """Of the bits of a tensor, on any device."""
    return f"{checksum_of({'': x}):016x}"


Member = tuple[PackedBatch, Shares]
"""A micro-batch, and its shares of the update."""


class Rounds:
    """Of one update, on one rank."""

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
        self._policy, self._objective, self._teacher = policy, objective, teacher
        self._recompute: Recompute = recompute
        self._router, self._compare, self._timing = router, compare, timing
        self._scored: ScoredPass | None = None
        self._loss: torch.Tensor | None = None
        self._leaves: list[torch.Tensor | None] = []
        self._failure: Exception | None = None

    def figures(self, members: Sequence[Member]) -> list[dict[str, Any]]:
        """Of all micro-batches of the update, in their order, whose gradients are added up; with
        one slot, of those up to the first round with a loss that is not finite.
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
            found = run_and_gather(world, partial(self._slot, own, gradient))
            for host in range(slots.hosts):
                made = found[host * gradient.group.size]
                figures[first + host :: slots.count] = made
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
            made = run_and_gather(group, partial(self.forward, own, active))[:active]
            figures += made
            if stops and not all(math.isfinite(one["loss"]) for one in made):
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
        scored, loss, leaves = self._scored, self._loss, self._leaves
        self._scored, self._loss, self._leaves = None, None, []
        try:
            if scored is not None and loss is not None:
                present = [leaf for leaf in leaves if leaf is not None]
                found = iter(torch.autograd.grad(loss, present, allow_unused=True))
                scored.backward(*(None if leaf is None else next(found) for leaf in leaves))
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
    """What a loss may depend on, in the order of ``ScoredPass.backward``."""
    found = (scores.log_probs, scores.entropies, scores.values, scores.divergences)
    return [None if one is None else one.requires_grad_() for one in found]


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """From one update on, micro-batches of at most ``new`` tokens rather than ``old``."""

    update: int
    """Updates of the run before it (``Trainer.updates``)."""
    old: int
    new: int


class MicrobatchBudget:
    """The tokens a micro-batch of every update of a run, and the changes made so far."""

    def __init__(self, tokens: int) -> None:
        self._setting = tokens
        self.changes: list[BudgetChange] = []
        self.on_change: Callable[[BudgetChange], None] | None = None
        """Called with a change before anything is learnt with it."""

    def at(self, update: int) -> int:
        """Tokens a micro-batch of the update after so many others."""
        return next(
            (change.new for change in reversed(self.changes) if change.update <= update),
            self._setting,
        )

    def set(self, update: int, tokens: int) -> None:
        """Change it from an update on."""
        change = BudgetChange(update, self.at(update), tokens)
        self.changes.append(change)
        if self.on_change is not None:
            self.on_change(change)


def halved(tokens: int, lengths: Sequence[int]) -> int | None:
    """Half the tokens of the largest micro-batch of sequences of these lengths; None where that is
    the longest sequence alone.
    """
    largest, longest = min(tokens, sum(lengths)), max(lengths)
    return max(largest // 2, longest) if largest > longest else None


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
        """Where the schedule and the count of skipped updates stand, for ``restore``."""
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
        finite, or if too many updates in a row had to be skipped.
        """
        assert batches, "an update needs at least one micro-batch"
        rate = learning_rate(self.updates, self.config, self.total_updates)
        totals = UpdateTotals(compare)
        try:
            with self.timing("backward"):
                norm, problem = self._gradients(batches, objective, totals)
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
                made = figures_text(rounds.figures(chosen))
                found = run_and_gather(policy.world, partial(_digests, policy, rounds))
            finally:
                self._optimiser.drop_gradients()
                policy.gradient.release()
            return made, {name: " ".join(one[name] for one in found) for name in policy.masters}

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
        for batch, made in zip(batches, figures, strict=False):
            totals.add(batch, made)
            if not math.isfinite(made["loss"]):
                return math.nan, f"the loss is {made['loss']}"
        squares = run_and_gather(world, rounds.squares)
        norm = gradient_norm(square for of_rank in squares for square in of_rank)
        return norm, None if norm <= _LARGEST_NORM else self._what_is_not_finite(norm)

    def _what_is_not_finite(self, norm: float) -> str:
        """The master nearest to the loss whose gradient holds a NaN or an infinity: the backward
        goes from there to all before it.
        """
        places = self.policy.world.all_gather(
            [
                place
                for place, master in enumerate(self.policy.masters.values())
                if master.grad is not None and not torch.isfinite(master.grad).all()
            ]
        )
        found = [place for of_rank in places for place in of_rank]
        if not found:
            return f"the gradient norm is {norm}"
        return f"the gradient of {list(self.policy.masters)[max(found)]} is not finite"

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
    """Of the rows of every gradient that this rank owns, once the rounds are over."""
    rounds.squares()
    return {
        name: "" if master.grad is None else digest_of(master.grad)
        for name, master in policy.masters.items()
    }
