"""RLOO: REINFORCE with the other samples' mean as baseline (arXiv 2402.14740, section 3.2).

    A_i = r_i - mean of the others        = G / (G - 1) * (r_i - mean(r))

A baseline that does not hold the sample itself leaves the gradient unbiased.  The divergence from
the reference is taken from the reward, a number for the completion.  The paper's loss is
-A * log pi; PPO's surrogate (``isobit.algorithms.clipped``) has its gradient in the first update
of a step, and holds the later ones back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import leave_one_out_advantages, penalised
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import RlooConfig


@dataclass(frozen=True, slots=True)
class Rloo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: RlooConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``leave_one_out_advantages``."""
        found = [leave_one_out_advantages(penalised(group)) for group in groups]
        return [[None if a is None else Credit(a) for a in group] for group in found]
