"""DAPO: decoupled clip and dynamic sampling (arXiv 2503.14476).

    A_i = (r_i - mean(r)) / std(r)        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

with four changes to GRPO: the upper bound of the clip is higher than the lower (section 3.1),
groups whose rewards are all equal are replaced by those of further prompts (3.2,
``dynamic_sampling``, which the step does), the mean is by token (3.3), and a completion that nears
the length limit loses reward (3.4, ``isobit.algorithms.overlong``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import group_credit
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import DapoConfig


@dataclass(frozen=True, slots=True)
class Dapo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: DapoConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)
