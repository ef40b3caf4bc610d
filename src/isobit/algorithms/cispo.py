"""CISPO: the ratio as a clipped weight of the gradient of log pi (MiniMax-M1, arXiv 2506.13585,
equations 4 and 5).

    l = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

No token loses its gradient, also not the rare one whose probability rose a lot; only its weight is
bounded.  The paper has no lower bound (``clip_low`` 1) and does not say its upper one; the default
bounds the weight at 5, as ScaleRL does (arXiv 2510.13786).  Advantages are GRPO's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.advantages import group_credit
from isobit.algorithms.clipped import ratio_metrics
from isobit.algorithms.objective import Credit, JudgedGroup, Shares
from isobit.algorithms.policy_gradient import PolicyGradient, Terms
from isobit.config.algorithm import CispoConfig
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores


@dataclass(frozen=True, slots=True)
class Cispo(PolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: CispoConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file; the clip fractions count the weights that are bounded, whatever
        the advantage.
        """
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio = torch.exp(scores.log_probs.detach() - batch.old_log_probs)
        loss = -ratio.clamp(low, high) * batch.advantages * scores.log_probs
        sums, maxima, minima = ratio_metrics(ratio, batch.advantages)
        sums["clip_fraction_low"] = float((ratio < low).sum())
        sums["clip_fraction_high"] = float((ratio > high).sum())
        return Terms(loss, sums, maxima, minima)
