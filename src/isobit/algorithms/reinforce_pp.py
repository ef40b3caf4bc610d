"""REINFORCE++: no critic and no group, but advantages normalised over the whole step (arXiv
2501.03262, section 3).

With the reward of a completion at its last token T and the penalties for the divergence from the
reference at each, the return of a token and its advantage are

    R_t = sum over k >= t of gamma^(k - t) * (r * [k = T] - kl_k)
    A_t = (R_t - mean(R)) / std(R)          over all tokens of the step

The surrogate is PPO's (``isobit.algorithms.clipped``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.algorithms.advantages import whiten
from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.gae import token_credit, token_rewards
from isobit.algorithms.objective import Credit, Judged, JudgedGroup
from isobit.config.algorithm import ReinforcePpConfig


@dataclass(frozen=True, slots=True)
class ReinforcePp(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: ReinforcePpConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See the top of this file; a completion without tokens is left out."""
        return token_credit(groups, self._returns, whiten)

    def _returns(self, judged: Judged) -> tuple[list[float], None]:
        found, following = [], 0.0
        for reward in reversed(token_rewards(judged)):
            following = reward + self.config.gamma * following
            found.append(following)
        return found[::-1], None
