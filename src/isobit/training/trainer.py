"""The trainer: one update from micro-batches, and the weights it publishes.

    for each micro-batch   forward, objective, backward       gradients add up in the FP32 masters
    then                   norm, clip, AdamW, publish         or nothing at all, if loss or norm
                                                              is not finite

A mixture of experts adds its router's own losses to the objective's (``isobit.training.router``).

An update that is not finite leaves masters, optimiser state and published weights as they were.

The objective runs on the host, on any device: it takes a few numbers a token, and what it reports
is wanted there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from isobit.algorithms.objective import LossOutputs, Objective
from isobit.clock import Timing, untimed
from isobit.config.training import TrainingConfig
from isobit.errors import NonFiniteError
from isobit.models.decoder import VALUE_HEAD
from isobit.models.function import LogProbFunction, function_of
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores
from isobit.training.budget import MicrobatchBudget
from isobit.training.comparison import ComparedTokens, Comparison, Mismatch
from isobit.training.optimiser import (
    build_optimiser,
    clip_gradients,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from isobit.training.router import RouterTotals, router_coefficients

_LARGEST_NORM = torch.finfo(torch.float32).max
"""Gradients are clipped in FP32, where a larger norm, which FP64 still holds, would make zeros of
them.
"""


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update did.  ``skipped`` says why it was not taken, or is None; then the
    means cover what ran before.
    """

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # response tokens
    entropy: float  # mean over those tokens, nats
    objective: dict[str, float]  # its own: means, maxima, minima over the tokens
    comparison: Comparison
    mismatch: Mismatch | None  # of the tokens compared; None where none were
    # share of the linears' published bytes that are others now; of numbers where they are BF16
    weight_bytes_changed: float
    skipped: str | None = None

    def scalars(self) -> dict[str, float]:
        """The figures by name, flat; names that end in ``_max`` are maxima, in ``_min`` minima."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "response_tokens": self.tokens,
            "entropy": self.entropy,
            "weight_bytes_changed": self.weight_bytes_changed,
            **self.objective,
        }


@dataclass(slots=True)
class _Totals:
    """Sums over the micro-batches of one update; ``compare`` adds the comparison with the recorded
    log-probabilities.
    """

    compare: bool
    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)
    compared: ComparedTokens = field(default_factory=ComparedTokens.none)
    router: RouterTotals = field(default_factory=RouterTotals)

    def add(self, batch: PackedBatch, scores: TokenScores, outputs: LossOutputs) -> None:
        self.loss += float(outputs.loss.detach())
        self.tokens += batch.rows.numel()
        self.entropy += float(scores.entropies.detach().double().sum())
        for name, value in outputs.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in outputs.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for name, value in outputs.minima.items():
            self.minima[name] = min(self.minima.get(name, value), value)
        if self.compare:
            self._compare(batch, scores)
        if scores.router is not None:
            self.router.add(scores.router)

    def _compare(self, batch: PackedBatch, scores: TokenScores) -> None:
        """What is replayed was drawn from other weights, and has other log-probabilities by
        right.
        """
        fresh = slice(None) if batch.fresh is None else batch.fresh
        self.compared.add(batch.recorded_log_probs[fresh], scores.log_probs.detach()[fresh])
        if batch.recorded_routings is not None and scores.routings is not None:
            self.compared.add_routings(batch.recorded_routings[fresh], scores.routings[fresh])

    def metrics(
        self, norm: float, rate: float, changed: float, skipped: str | None
    ) -> UpdateMetrics:
        means = {name: value / self.tokens for name, value in self.sums.items()}
        objective = means | self.maxima | self.minima | self.router.figures()
        return UpdateMetrics(
            self.loss,
            norm,
            rate,
            self.tokens,
            self.entropy / self.tokens,
            objective,
            self.compared.comparison(),
            self.compared.mismatch(),
            changed,
            skipped,
        )


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
    ) -> None:
        """``total_updates`` is the number of optimiser steps of the whole run: the length of the
        schedule; ``seed`` is the run's.  ``timing`` is told of an update's phases: backward (with
        the loss, and interrupted by each forward), optimiser, and publish within it.  A value head
        learns ``head_rate`` times as fast as the rest.
        """
        self.timing = timing
        self.policy = policy
        self.scorer = Scorer(policy)
        """Log-probabilities by the training forward, without learning from them."""
        self.config = config
        self.total_updates = total_updates
        head = f"{VALUE_HEAD}.weight"
        self._optimiser = build_optimiser(
            policy.masters, config, policy.backend, seed, head, head_rate
        )
        self.updates = 0
        """Updates taken or skipped so far."""
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
            self._optimiser.state[master][kind] = value.to(device, copy=True)

    def update(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        compare: bool = False,
    ) -> UpdateMetrics:
        """One update over all micro-batches together.

        ``compare`` counts recorded log-probabilities that differ from this forward's, but for what
        is replayed.  Raises
        NonFiniteError if a log-probability is not finite, or if too many updates in a row had to be
        skipped.
        """
        assert batches, "an update needs at least one micro-batch"
        rate = learning_rate(self.updates, self.config, self.total_updates)
        totals = _Totals(compare)
        try:
            with self.timing("backward"):
                norm, problem = self._gradients(batches, objective, totals)
            if problem is None:
                with self.timing("optimiser"):
                    self._step(norm, rate)
        finally:
            self._optimiser.zero_grad()
        self.updates += 1
        self._count_skip(problem)
        return totals.metrics(norm, rate, 0.0 if problem else self.policy.change.share, problem)

    def _gradients(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        totals: _Totals,
    ) -> tuple[float, str | None]:
        """Leave the update's gradients in the masters; -> their norm, and what is not finite, if
        anything is.
        """
        router = router_coefficients(self.config, batches)
        for batch, shares in zip(batches, objective.shares(batches), strict=True):
            scored = ScoredPass(self.policy, batch, self.config.recompute, router)
            with self.timing("forward"):
                scores = scored.forward()
            leaves = _leaves(scores)
            outputs = objective.loss(scores, batch, shares)
            totals.add(batch, scores, outputs)
            if not torch.isfinite(outputs.loss):
                return math.nan, f"the loss is {float(outputs.loss.detach())}"
            scored.backward(*torch.autograd.grad(outputs.loss, leaves, allow_unused=True))
        masters = self.policy.masters.values()
        grads = [master.grad for master in masters if master.grad is not None]
        norm = gradient_norm(self.policy.backend.gradient_squares(grads))
        return norm, None if norm <= _LARGEST_NORM else self._what_is_not_finite(norm)

    def _what_is_not_finite(self, norm: float) -> str:
        """The master nearest to the loss whose gradient holds a NaN or an infinity: the backward
        goes from there to all before it.
        """
        for name, master in reversed(self.policy.masters.items()):
            if master.grad is not None and not torch.isfinite(master.grad).all():
                return f"the gradient of {name} is not finite"
        return f"the gradient norm is {norm}"

    def _step(self, norm: float, rate: float) -> None:
        clip_gradients(self._optimiser, norm, self.config.max_grad_norm)
        set_learning_rate(self._optimiser, rate)
        self.is_whole = False
        self._optimiser.step()
        with self.timing("publish"):
            self.policy.publish()
        self.is_whole = True

    def _count_skip(self, problem: str | None) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if problem else 0
        if problem and self._skipped_in_a_row >= self.config.max_skipped_updates:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row were skipped, the last because "
                f"{problem}; "
                f"training.max_skipped_updates is {self.config.max_skipped_updates}. The weights "
                "are those of the last good one: "
                "lower the learning rate, or look for what is not finite in rewards or weights"
            )


def _leaves(scores: TokenScores) -> list[torch.Tensor]:
    """The scores that a loss may depend on, in the order of ``ScoredPass.backward``."""
    found = (scores.log_probs, scores.entropies, scores.values)
    return [one.requires_grad_() for one in found if one is not None]
