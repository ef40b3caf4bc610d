"""GSPO: ratio and clip of a whole sequence (arXiv 2507.18071, equations 5 and 7).

    s = exp(mean over the sequence's tokens of log(pi / pi_old))
    l = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

l is the same for every token of a sequence, and the gradient of s goes to all of them alike: s / n
times grad log pi each.  The geometric mean stays near 1, and so do the bounds (section 5.1: 3e-4
and 4e-4).  Advantages are GRPO's; the mean is by sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.advantages import group_credit
from isobit.algorithms.clipped import ClipBounds, clipped_surrogate, ratio_metrics
from isobit.algorithms.objective import Credit, JudgedGroup, Shares
from isobit.algorithms.policy_gradient import PolicyGradient, Terms
from isobit.algorithms.sequences import sequence_means
from isobit.config.algorithm import GspoConfig
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores


@dataclass(frozen=True, slots=True)
class Gspo(PolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: GspoConfig

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file; a sequence lies in one micro-batch."""
        bounds = ClipBounds(self.config.clip_low, self.config.clip_high)
        log_ratio = scores.log_probs - batch.old_log_probs
        ratio = torch.exp(sequence_means(log_ratio, batch.sequence))[batch.sequence]
        loss = clipped_surrogate(ratio, batch.advantages, bounds.clip_low, bounds.clip_high)
        return Terms(loss, *ratio_metrics(ratio.detach(), batch.advantages, bounds))
