"""ReMax: REINFORCE with the reward of the prompt's greedy completion as baseline (arXiv 2310.10505,
algorithm 1).

    A_i = r_i - r(greedy)

The divergence from the reference is taken from the reward of the sample.  The paper's loss is
-A * log pi; PPO's surrogate (``isobit.algorithms.clipped``) has its gradient in the first update of
a step, and holds the later ones back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import penalised
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Credit, JudgedGroup
from isobit.config.algorithm import ReMaxConfig


@dataclass(frozen=True, slots=True)
class ReMax(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: ReMaxConfig

    needs_greedy = True

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """Reward less baseline; a group without a baseline, whose greedy completion could not be
        graded, is left out.
        """
        return [_credit(group, group.baseline) for group in groups]


def _credit(group: JudgedGroup, baseline: float | None) -> list[Credit | None]:
    return [
        None if reward is None or baseline is None else Credit(reward - baseline)
        for reward in penalised(group)
    ]
