"""How far the recorded log-probabilities, and the experts that were chosen, are from the trainer's
own: in an exact flow, nowhere.

Bits are compared, not values within a tolerance: a NaN equals itself here, and 0.0 differs from
-0.0.

With d = trained - recorded of a token, r = exp(d) the probability ratio of trainer and sampler:

    k1      mean of -d                      estimates KL(sampler || trainer), of either sign
    k3      mean of exp(d) - 1 - d          the same, never negative
    error   mean of exp(|d|)                NeMo RL's token multiplicative probability error
    ess     (sum r)^2 / (n sum r^2)         effective sample size, as a share of the n tokens

(k1 and k3: J. Schulman, joschu.net/blog/kl-approx.html.)  d is kept within +-20, so that a vanished
probability does not drown everything else.

The metrics of an update: what each micro-batch reports, and the reduction over all of them in
their order, by every rank alike, whichever rank computed what.

How a metric is reduced stands in its row of the table (``isobit.records.metrics``).  Three things
are no metrics of single micro-batches and are added up beside them: the load of the experts, whose
busiest and idle ones are known at the end of the update only, the ratios that the effective sample
size is made of, and the log-probabilities that are compared with the recorded ones.

A mixture of experts adds its router's losses to the objective's: over the S sequences of the update
and all sparse layers,

    1/S * sum over s, layers of  router_balance * balance_s + router_z * z_s

(``isobit.kernels.routing``), a mean over sequences, however they are cut into micro-batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from isobit.algorithms.corrections import LARGEST_LOG_RATIO
from isobit.algorithms.objective import LossOutputs
from isobit.algorithms.sample_size import effective_sample_size, sample_sizes
from isobit.config.training import OptimisationConfig
from isobit.models.mlp import RouterCoefficients
from isobit.parallel.world import raised_on_all
from isobit.records.batch import PackedBatch, RouterScores, TokenScores
from isobit.records.metrics import Metrics, add_microbatch, of_update
from isobit.records.sequence import TokenSequence
from isobit.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts over response tokens; two comparisons add up."""

    tokens_compared: int = 0
    tokens_differing: int = 0
    max_abs_diff: float = 0.0
    sum_abs_diff: float = 0.0
    routings_compared: int = 0
    """Tokens of a mixture of experts whose digests of experts were compared."""
    routings_differing: int = 0

    @property
    def differs(self) -> bool:
        """Whether a log-probability or a routing does."""
        return bool(self.tokens_differing or self.routings_differing)

    def describe_routings(self) -> str:
        """The routings of a mixture of experts that differ, as the rest of a sentence on
        log-probabilities; empty for another model.
        """
        if not self.routings_compared:
            return ""
        return f", {self.routings_differing:,} of {self.routings_compared:,} routings"

    @property
    def mean_abs_diff(self) -> float:
        """Mean absolute difference over the tokens compared, nats."""
        return self.sum_abs_diff / max(self.tokens_compared, 1)

    def metrics(self, learnt: int = 0) -> Metrics:
        """The counts and differences by name; of so many response tokens learnt from, the share
        that was compared, where that is below 1.
        """
        found: Metrics = {
            "log_prob_diff/mean": self.mean_abs_diff,
            "log_prob_diff/max": self.max_abs_diff,
            "log_prob_diff/tokens_compared": self.tokens_compared,
            "log_prob_diff/tokens_differing": self.tokens_differing,
        }
        if self.tokens_compared < learnt:
            found["log_prob_diff/share"] = self.tokens_compared / learnt
        if self.routings_compared:
            found["routing_diff/tokens_compared"] = self.routings_compared
            found["routing_diff/tokens_differing"] = self.routings_differing
        return found

    @classmethod
    def of(cls, recorded: torch.Tensor, trained: torch.Tensor) -> Self:
        """Compare two float32 [N] of log-probabilities."""
        if not recorded.numel():
            return cls()
        differing = int((recorded.view(torch.int32) != trained.view(torch.int32)).sum())
        difference = (recorded.double() - trained.double()).abs()
        return cls(recorded.numel(), differing, float(difference.max()), float(difference.sum()))

    @classmethod
    def of_routings(cls, recorded: torch.Tensor, trained: torch.Tensor) -> Self:
        """Compare two int64 [N] of digests."""
        differing = int((recorded != trained).sum())
        return cls(routings_compared=recorded.numel(), routings_differing=differing)

    @classmethod
    def of_batch(cls, batch: PackedBatch, scores: TokenScores) -> "Comparison":
        """Compare what was recorded of a batch's targets with what a forward says of them."""
        found = cls.of(batch.recorded_log_probs, scores.log_probs)
        if batch.recorded_routings is None or scores.routings is None:
            return found
        return found + cls.of_routings(batch.recorded_routings, scores.routings)

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.tokens_compared + other.tokens_compared,
            self.tokens_differing + other.tokens_differing,
            max(self.max_abs_diff, other.max_abs_diff),
            self.sum_abs_diff + other.sum_abs_diff,
            self.routings_compared + other.routings_compared,
            self.routings_differing + other.routings_differing,
        )


def mismatch(recorded: torch.Tensor, trained: torch.Tensor) -> Metrics:
    """The train-inference mismatch of two float32 [N] of log-probabilities, by the names of its
    metrics; the formulas are above.  Empty without a token.
    """
    if not recorded.numel():
        return {}
    difference = trained.double() - recorded.double()
    clamped = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = clamped.exp()
    rank = max(1, -(-99 * recorded.numel() // 100))  # of the smallest value that 99% reach
    return {
        "log_prob_diff/p99": float(difference.abs().kthvalue(rank).values),
        "mismatch/k1": float(-difference.mean()),
        "mismatch/k3": float((torch.expm1(clamped) - clamped).mean()),
        "mismatch/mult_prob_error": float(clamped.abs().exp().mean()),
        "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/ratio_min": float(ratio.min()),
        "mismatch/ratio_max": float(ratio.max()),
        "mismatch/effective_sample_size": effective_sample_size(ratio),
    }


@dataclass(slots=True)
class ComparedTokens:
    """Log-probabilities to be compared, as they come by micro-batch, and digests of experts."""

    _recorded: list[torch.Tensor]
    _trained: list[torch.Tensor]
    _routings: Comparison = field(default_factory=Comparison)

    @classmethod
    def none(cls) -> Self:
        """Nothing yet."""
        return cls([], [])

    def add(self, recorded: torch.Tensor, trained: torch.Tensor) -> None:
        """Two float32 [N]."""
        self._recorded.append(recorded)
        self._trained.append(trained)

    def add_routings(self, recorded: torch.Tensor, trained: torch.Tensor) -> None:
        """Two int64 [N] of digests."""
        self._routings += Comparison.of_routings(recorded, trained)

    def add_sequence(self, sequence: TokenSequence) -> None:
        """What was recorded of a sequence, beside its old log-probabilities and routings."""

        def response(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(sequence.of_response(column))

        assert sequence.old_log_probs is not None, "nothing to compare the recorded ones with"
        self.add(response(sequence.log_probs), response(sequence.old_log_probs))
        if sequence.routings is not None and sequence.old_routings is not None:
            self.add_routings(response(sequence.routings), response(sequence.old_routings))

    def comparison(self) -> Comparison:
        """The comparison of all tokens, bit for bit."""
        found = Comparison.of(_joined(self._recorded), _joined(self._trained))
        return found + self._routings

    def mismatch(self) -> Metrics:
        """The train-inference mismatch of all tokens; empty without one."""
        return mismatch(_joined(self._recorded), _joined(self._trained))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float32), *parts])


def router_coefficients(
    config: OptimisationConfig, batches: Sequence[PackedBatch]
) -> RouterCoefficients:
    """The coefficients of one sequence of an update."""
    sequences = sum(len(batch.lengths) for batch in batches)
    return RouterCoefficients(config.router_balance / sequences, config.router_z / sequences)


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update did.  Where it was skipped, the metrics cover what ran before."""

    metrics: Metrics
    tokens: int
    """Response tokens."""
    comparison: Comparison
    mismatch: Metrics
    """The train-inference mismatch of the tokens compared; empty where none were."""
    skipped: str | None = None
    """Why it was not taken, or None."""


def microbatch_figures(scores: TokenScores, outputs: LossOutputs, compare: bool) -> dict[str, Any]:
    """What one micro-batch adds to an update's metrics, as a message
    (``isobit.parallel.world``); with ``compare`` its log-probabilities and experts as well.
    """
    router = scores.router
    return {
        "loss": float(outputs.loss.detach()),
        "metrics": {
            "entropy": float(scores.entropies.detach().double().sum()),
            **outputs.metrics,
        },
        "log_probs": scores.log_probs.detach() if compare else None,
        "routings": scores.routings if compare else None,
        "router": None if router is None else [router.balance, router.z, router.load],
        "ratios": outputs.ratios,
    }


@dataclass(slots=True)
class UpdateTotals:
    """What the micro-batches of one update have added up to so far; ``compare`` adds the comparison
    with the recorded log-probabilities.
    """

    compare: bool
    loss: float = 0.0
    tokens: int = 0
    totals: Metrics = field(default_factory=dict)
    compared: ComparedTokens = field(default_factory=ComparedTokens.none)
    sequences: int = 0
    balance: float = 0.0
    z: float = 0.0
    load: torch.Tensor | None = None
    """int64 [layers, E], tokens of each expert; None for a model without experts."""
    ratios: list[torch.Tensor] = field(default_factory=list)
    """``ratio_sums`` of each micro-batch whose objective has ratios."""

    def add(self, batch: PackedBatch, figures: Mapping[str, Any]) -> None:
        """Add the next micro-batch."""
        self.loss += figures["loss"]
        self.tokens += batch.rows.numel()
        add_microbatch(self.totals, figures["metrics"])
        if self.compare:
            self._compare(batch, figures["log_probs"], figures["routings"])
        if figures["router"] is not None:
            self._add_router(RouterScores(*figures["router"]))
        if figures["ratios"] is not None:
            self.ratios.append(figures["ratios"])

    def _compare(
        self, batch: PackedBatch, log_probs: torch.Tensor, routings: torch.Tensor | None
    ) -> None:
        """Compare the fresh tokens: what is replayed, or was sampled ahead, was drawn from other
        weights and rightly has other log-probabilities.
        """
        fresh = slice(None) if batch.fresh is None else batch.fresh
        self.compared.add(batch.recorded_log_probs[fresh], log_probs[fresh])
        if batch.recorded_routings is not None and routings is not None:
            self.compared.add_routings(batch.recorded_routings[fresh], routings[fresh])

    def _add_router(self, scores: RouterScores) -> None:
        self.sequences += scores.balance.numel()
        self.balance += float(scores.balance.double().sum())
        self.z += float(scores.z.double().sum())
        self.load = scores.load if self.load is None else self.load + scores.load

    def rate_factor(self) -> float:
        """The square root of the effective share of the update's sequences
        (``isobit.algorithms.sample_size``).  Raises ConfigError where the objective has no ratios.
        """
        if not self.ratios:
            reason = (
                "training.rate_by_ess is true, but the algorithm reports no ratios, of which the "
                "effective sample size is made; give LossOutputs.ratios "
                "(isobit.algorithms.sample_size.ratio_sums), or leave rate_by_ess out"
            )
            raise raised_on_all(ConfigError(reason))
        return math.sqrt(sample_sizes(self.ratios, self.tokens)["ratio/effective_sequences"])

    def metrics(self, norm: float, rate: float, changed: float) -> Metrics:
        """The metrics of the update, with the gradient norm, the learning rate and the share of
        published bytes that changed.
        """
        return {
            "loss": self.loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "response_tokens": self.tokens,
            "weight_bytes_changed": changed,
            **of_update(self.totals, self.tokens),
            **sample_sizes(self.ratios, self.tokens),
            **self._router_metrics(),
        }

    def _router_metrics(self) -> Metrics:
        if self.load is None:
            return {}
        shares = self.load / self.load.sum(1, keepdim=True)
        return {
            "router/balance": self.balance / self.sequences,
            "router/z": self.z / self.sequences,
            "router/busiest": float(shares.max()),
            "router/idle": float((self.load == 0).sum()),
        }
