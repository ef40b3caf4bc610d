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
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from isobit.algorithms.corrections import LARGEST_LOG_RATIO, effective_sample_size
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.metrics import Metrics
from isobit.records.sequence import TokenSequence


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
        """Whether anything does."""
        return bool(self.tokens_differing or self.routings_differing)

    def describe_routings(self) -> str:
        """Of a mixture of experts, as the rest of a sentence on log-probabilities; else empty."""
        if not self.routings_compared:
            return ""
        return f", {self.routings_differing:,} of {self.routings_compared:,} routings"

    @property
    def mean_abs_diff(self) -> float:
        """Over the tokens compared, nats."""
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
        """Bit for bit."""
        found = Comparison.of(_joined(self._recorded), _joined(self._trained))
        return found + self._routings

    def mismatch(self) -> Metrics:
        """By distance; empty without a token."""
        return mismatch(_joined(self._recorded), _joined(self._trained))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float32), *parts])
