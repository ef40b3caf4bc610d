"""GRPO: the clipped surrogate of PPO with advantages relative to the group, and no critic.

For a token with ratio r = pi(token) / pi_old(token) and the advantage A of its answer (PPO, arXiv
1707.06347, equation 7; GRPO, DeepSeekMath, arXiv 2402.03300, equation 3; two clip bounds: DAPO,
arXiv 2503.14476, section 3.1):

    l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

The gradient vanishes where the clip is active: r above the upper bound with A > 0, r below the
lower bound with A < 0.  Where the policy that sampled is the one being trained, bit for bit, r is
exactly 1 and l has the gradient of -A * log pi.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.advantages import group_advantages
from isobit.algorithms.mean import mean_weights
from isobit.algorithms.objective import Credit, JudgedGroup, LossOutputs, Shares
from isobit.config.algorithm import AlgorithmConfig
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores


@dataclass(frozen=True, slots=True)
class Grpo:
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: AlgorithmConfig

    needs_values = False
    needs_greedy = False

    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """See ``group_advantages``."""
        advantages = [
            group_advantages([one.reward for one in group.samples], self.config.normalise_by_std)
            for group in groups
        ]
        return [[None if a is None else Credit(a) for a in group] for group in advantages]

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """See ``mean_weights``."""
        sequences = [batch.sequence for batch in batches]
        return [Shares(mean) for mean in mean_weights(self.config.loss_mean, sequences)]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """The weighted sum of the clipped surrogate over the N tokens, with clip fractions and
        ratios to report.
        """
        ratio = torch.exp(scores.log_probs - batch.old_log_probs)
        loss = (
            shares.mean
            * clipped_surrogate(
                ratio, batch.advantages, self.config.clip_low, self.config.clip_high
            )
        ).sum()
        sums, maxima = ratio_metrics(
            ratio.detach(), batch.advantages, self.config.clip_low, self.config.clip_high
        )
        return LossOutputs(loss, sums, maxima)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """The loss of each token, [N], from ratios [N] and advantages [N]; the formula is at the top of
    this file.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def ratio_metrics(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over the tokens: ratios, and the tokens whose gradient the clip removes,
    below and above.
    """
    if not ratio.numel():
        return {}, {}
    sums = {
        "ratio_mean": float(ratio.double().sum()),
        "clip_fraction_low": float(((ratio < 1.0 - clip_low) & (advantages < 0)).sum()),
        "clip_fraction_high": float(((ratio > 1.0 + clip_high) & (advantages > 0)).sum()),
    }
    return sums, {"ratio_max": float(ratio.max())}
