"""How far the recorded log-probabilities are from the trainer's own: in an exact flow, nowhere.

Bits are compared, not values within a tolerance: a NaN equals itself here, and 0.0 differs from
-0.0.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts over response tokens; two comparisons add up."""

    tokens_compared: int = 0
    tokens_differing: int = 0
    max_abs_diff: float = 0.0
    sum_abs_diff: float = 0.0

    @property
    def mean_abs_diff(self) -> float:
        """Over the tokens compared, nats."""
        return self.sum_abs_diff / max(self.tokens_compared, 1)

    @classmethod
    def of(cls, recorded: torch.Tensor, trained: torch.Tensor) -> Self:
        """Compare two float32 [N] of log-probabilities."""
        if not recorded.numel():
            return cls()
        differing = int((recorded.view(torch.int32) != trained.view(torch.int32)).sum())
        difference = (recorded.double() - trained.double()).abs()
        return cls(recorded.numel(), differing, float(difference.max()), float(difference.sum()))

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.tokens_compared + other.tokens_compared,
            self.tokens_differing + other.tokens_differing,
            max(self.max_abs_diff, other.max_abs_diff),
            self.sum_abs_diff + other.sum_abs_diff,
        )
