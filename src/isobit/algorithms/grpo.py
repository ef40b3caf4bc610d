"""GRPO: the clipped surrogate of PPO with advantages relative to the group, and no critic.

    A_i = (r_i - mean(r)) / std(r)        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

DeepSeekMath, arXiv 2402.03300, section 4.1 and equation 3.  The penalty for the divergence from the
reference (equation 4) is ``kl_coefficient`` with k3 in the loss.  The paper's mean is by sequence
and its bounds are equal; the defaults here are DAPO's token mean and higher upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import group_credit
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import GrpoConfig


@dataclass(frozen=True, slots=True)
class Grpo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: GrpoConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, self.config.normalise_by_std)
