"""REINFORCE++ with the group's mean as baseline (arXiv 2501.03262, section 3.3).

    a_i = r_i - mean of its group
    A_i = a_i / std(a)                      over all completions of the step

One standard deviation for the step, where GRPO has one a group: a group that is almost always
solved does not weigh more than others.  The mean of a over the step is zero, since it is in each
group, so that none is subtracted and a group of equal rewards has advantages of exactly zero.  (The
authors' code takes mean and deviation over tokens, which weighs long completions more.)  The
divergence from the reference is a k2 term of the loss.  The surrogate is PPO's
(``isobit.algorithms.clipped``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import batch_normalised, group_advantages, penalised
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import ReinforcePpBaselineConfig


@dataclass(frozen=True, slots=True)
class ReinforcePpBaseline(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: ReinforcePpBaselineConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See the top of this file."""
        centred = [group_advantages(penalised(group), normalise_by_std=False) for group in groups]
        return [
            [None if a is None else Credit(a) for a in group] for group in batch_normalised(centred)
        ]
