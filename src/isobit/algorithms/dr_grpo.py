"""Dr. GRPO: GRPO done right (arXiv 2503.20783, section 3).

    A_i = r_i - mean(r)        the mean of the loss: 1 / (S * C) for each token of S completions

Two biases are gone: the division by the group's standard deviation, which weighs questions that are
almost always or almost never solved more than the others, and the division by a completion's own
length, which punishes a long wrong answer less a token than a short one.  The constant C is
``loss_constant``.  The surrogate is PPO's (``isobit.algorithms.clipped``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import group_credit
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import DrGrpoConfig


@dataclass(frozen=True, slots=True)
class DrGrpo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: DrGrpoConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``; without the standard deviation."""
        return group_credit(groups, normalise_by_std=False)
