"""GRPO and its relatives: the advantages of each, and the loss of a token where it has its own.

GRPO is the clipped surrogate of PPO with advantages relative to the group, and no critic
(DeepSeekMath, arXiv 2402.03300, section 4.1 and equation 3).  Of the completions i of one prompt,
with rewards r_i and r the ratio pi / pi_old of a token:

    A_i = (r_i - mean(r)) / std(r)        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

What each of the others changes:

                    advantage                       loss of a token       mean of the loss
    Dr. GRPO        without the deviation           -                     by a constant
    DAPO            -                               higher upper bound    by token
    GSPO            -                               ratio of a sequence   by sequence
    CISPO           -                               clipped weight        -
    RLOO            less the mean of the others     -                     -
    REINFORCE++     whitened over the step          -                     -
      with baseline less the group's mean, over     -                     -
                    the step's deviation
    ReMax           less the greedy completion's    -                     -
                    reward

``isobit.algorithms.policy_gradient`` has the loss and the means that all share, and
``isobit.algorithms.ppo`` the one with a critic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.advantages import (
    batch_normalised,
    columns_of,
    group_advantages,
    group_credit,
    leave_one_out_advantages,
    penalised,
    token_credit,
    token_rewards,
    whiten,
)
from isobit.algorithms.corrections import sequence_means
from isobit.algorithms.objective import Columns, Shares
from isobit.algorithms.policy_gradient import (
    ClipBounds,
    ClippedPolicyGradient,
    PolicyGradient,
    Terms,
    clipped_surrogate,
    ratio_metrics,
)
from isobit.config.algorithm import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    ReMaxConfig,
    RlooConfig,
)
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.rounding import are_level
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group


@dataclass(frozen=True, slots=True)
class Grpo(ClippedPolicyGradient):
    """GRPO (DeepSeekMath, arXiv 2402.03300).

    The penalty for the divergence from the reference (equation 4) is ``kl_coefficient`` with k3 in
    the loss.  The paper's mean is by sequence and its bounds are equal; the defaults here are
    DAPO's token mean and higher upper bound.
    """

    config: GrpoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``group_advantages``."""
        return group_credit(groups, self.config.normalise_by_std)


@dataclass(frozen=True, slots=True)
class DrGrpo(ClippedPolicyGradient):
    """Dr. GRPO: GRPO done right (arXiv 2503.20783, section 3).

        A_i = r_i - mean(r)        the mean of the loss: 1 / (S * C) for each token of S completions

    Two biases are gone: the division by the group's standard deviation, which weighs questions that
    are almost always or almost never solved more than the others, and the division by a
    completion's own length, which punishes a long wrong answer less a token than a short one.  The
    constant C is ``loss_constant``.
    """

    config: DrGrpoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``group_advantages``, without the standard deviation."""
        return group_credit(groups, normalise_by_std=False)


@dataclass(frozen=True, slots=True)
class Dapo(ClippedPolicyGradient):
    """DAPO: decoupled clip and dynamic sampling (arXiv 2503.14476).

    Four changes to GRPO: the upper bound of the clip is higher than the lower (section 3.1), groups
    whose rewards are all equal are replaced by those of further prompts (3.2, ``dynamic_sampling``,
    which the step does), the mean is by token (3.3), and a completion that nears the length limit
    loses reward (3.4, ``overlong_punishment``).
    """

    config: DapoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)


@dataclass(frozen=True, slots=True)
class Gspo(PolicyGradient):
    """GSPO: ratio and clip of a whole sequence (arXiv 2507.18071, equations 5 and 7).

        s = exp(mean over the sequence's tokens of log(pi / pi_old))
        l = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

    l is the same for every token of a sequence, and the gradient of s goes to all of them alike:
    s / n times grad log pi each.  The geometric mean stays near 1, and so do the bounds (section
    5.1: 3e-4 and 4e-4).  Advantages are GRPO's; the mean is by sequence.
    """

    config: GspoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """The formula above; a sequence lies in one micro-batch."""
        bounds = ClipBounds(self.config.clip_low, self.config.clip_high)
        log_ratio = scores.log_probs - batch.old_log_probs
        ratio = torch.exp(sequence_means(log_ratio, batch.sequence))[batch.sequence]
        loss = clipped_surrogate(ratio, batch.advantages, bounds.clip_low, bounds.clip_high)
        return Terms(loss, ratio_metrics(ratio.detach(), batch.advantages, bounds))


@dataclass(frozen=True, slots=True)
class Cispo(PolicyGradient):
    """CISPO: the ratio as a clipped weight of the gradient of log pi (MiniMax-M1, arXiv 2506.13585,
    equations 4 and 5).

        l = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

    No token loses its gradient, also not the rare one whose probability rose a lot; only its weight
    is bounded.  The paper has no lower bound (``clip_low`` 1) and does not say its upper one; the
    default bounds the weight at 5, as ScaleRL does (arXiv 2510.13786).  Advantages are GRPO's.
    """

    config: CispoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """The formula above; the clip fractions count the weights that are bounded, whatever the
        advantage.
        """
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio = torch.exp(scores.log_probs.detach() - batch.old_log_probs)
        loss = -ratio.clamp(low, high) * batch.advantages * scores.log_probs
        metrics = ratio_metrics(ratio, batch.advantages)
        metrics["clip_fraction/low"] = float((ratio < low).sum())
        metrics["clip_fraction/high"] = float((ratio > high).sum())
        return Terms(loss, metrics)


@dataclass(frozen=True, slots=True)
class Rloo(ClippedPolicyGradient):
    """RLOO: REINFORCE with the other samples' mean as baseline (arXiv 2402.14740, section 3.2).

        A_i = r_i - mean of the others        = G / (G - 1) * (r_i - mean(r))

    A baseline that does not hold the sample itself leaves the gradient unbiased.  The divergence
    from the reference is taken from the reward, a number for the completion.  The paper's loss is
    -A * log pi; PPO's surrogate has its gradient in the first update of a step, and holds the later
    ones back.
    """

    config: RlooConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages by ``leave_one_out_advantages``."""
        return columns_of([leave_one_out_advantages(penalised(group)) for group in groups])


@dataclass(frozen=True, slots=True)
class ReinforcePp(ClippedPolicyGradient):
    """REINFORCE++: no critic and no group, but advantages normalised over the whole step (arXiv
    2501.03262, section 3).

    With the reward of a completion at its last token T and the penalties for the divergence from
    the reference at each, the return of a token and its advantage are

        R_t = sum over k >= t of gamma^(k - t) * (r * [k = T] - kl_k)
        A_t = (R_t - mean(R)) / std(R)          over all tokens of the step
    """

    config: ReinforcePpConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """The formula above; a completion without tokens is left out."""
        return token_credit(groups, self._returns, whiten)

    def _returns(self, sequence: TokenSequence, reward: float) -> tuple[list[float], None]:
        returns, following = [], 0.0
        for of_token in reversed(token_rewards(sequence, reward)):
            following = of_token + self.config.gamma * following
            returns.append(following)
        return returns[::-1], None


@dataclass(frozen=True, slots=True)
class ReinforcePpBaseline(ClippedPolicyGradient):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262, section 3.3).

        a_i = r_i - mean of its group
        A_i = a_i / std(a)                      over all completions of the step

    One standard deviation for the step, where GRPO has one a group: a group that is almost always
    solved does not weigh more than others.  The mean of a over the step is zero, since it is in
    each group, so that none is subtracted and a group of equal rewards has advantages of exactly
    zero.  (The authors' code takes mean and deviation over tokens, which weighs long completions
    more.)  The divergence from the reference is a k2 term of the loss.
    """

    config: ReinforcePpBaselineConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """The formula above."""
        centred = [group_advantages(penalised(group), normalise_by_std=False) for group in groups]
        return columns_of(batch_normalised(centred))


@dataclass(frozen=True, slots=True)
class ReMax(ClippedPolicyGradient):
    """ReMax: REINFORCE with the reward of the prompt's greedy completion as baseline (arXiv
    2310.10505, algorithm 1).

        A_i = r_i - r(greedy)

    The divergence from the reference is taken from the reward of the sample.  The paper's loss is
    -A * log pi; PPO's surrogate has its gradient in the first update of a step, and holds the later
    ones back.
    """

    config: ReMaxConfig

    needs_greedy = True

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Reward less baseline; a group without a baseline, whose greedy completion could not be
        graded, is left out.
        """
        return columns_of([_above(penalised(group), group.baseline) for group in groups])


def _above(rewards: Sequence[float | None], baseline: float | None) -> list[float | None]:
    """Each reward less the baseline; exactly 0 where they are equal but for rounding."""
    return [
        None if r is None or baseline is None else 0.0 if are_level((r, baseline)) else r - baseline
        for r in rewards
    ]
