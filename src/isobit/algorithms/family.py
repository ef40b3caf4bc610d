"""CISPO: the ratio as a clipped weight of the gradient of log pi (MiniMax-M1, arXiv 2506.13585,
equations 4 and 5).

    l = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

No token loses its gradient, also not the rare one whose probability rose a lot; only its weight is
bounded.  The paper has no lower bound (``clip_low`` 1) and does not say its upper one; the default
bounds the weight at 5, as ScaleRL does (arXiv 2510.13786).  Advantages are GRPO's.

DAPO: decoupled clip and dynamic sampling (arXiv 2503.14476).

    A_i = (r_i - mean(r)) / std(r)        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

with four changes to GRPO: the upper bound of the clip is higher than the lower (section 3.1),
groups whose rewards are all equal are replaced by those of further prompts (3.2,
``dynamic_sampling``, which the step does), the mean is by token (3.3), and a completion that nears
the length limit loses reward (3.4, ``isobit.algorithms.advantages``).

Dr. GRPO: GRPO done right (arXiv 2503.20783, section 3).

    A_i = r_i - mean(r)        the mean of the loss: 1 / (S * C) for each token of S completions

Two biases are gone: the division by the group's standard deviation, which weighs questions that are
almost always or almost never solved more than the others, and the division by a completion's own
length, which punishes a long wrong answer less a token than a short one.  The constant C is
``loss_constant``.  The surrogate is PPO's (``isobit.algorithms.policy_gradient``).

GRPO: the clipped surrogate of PPO with advantages relative to the group, and no critic.

    A_i = (r_i - mean(r)) / std(r)        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

DeepSeekMath, arXiv 2402.03300, section 4.1 and equation 3.  The penalty for the divergence from the
reference (equation 4) is ``kl_coefficient`` with k3 in the loss.  The paper's mean is by sequence
and its bounds are equal; the defaults here are DAPO's token mean and higher upper bound.

Sums and means over the response tokens of each sequence.

GSPO: ratio and clip of a whole sequence (arXiv 2507.18071, equations 5 and 7).

    s = exp(mean over the sequence's tokens of log(pi / pi_old))
    l = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

l is the same for every token of a sequence, and the gradient of s goes to all of them alike: s / n
times grad log pi each.  The geometric mean stays near 1, and so do the bounds (section 5.1: 3e-4
and 4e-4).  Advantages are GRPO's; the mean is by sequence.

REINFORCE++: no critic and no group, but advantages normalised over the whole step (arXiv
2501.03262, section 3).

With the reward of a completion at its last token T and the penalties for the divergence from the
reference at each, the return of a token and its advantage are

    R_t = sum over k >= t of gamma^(k - t) * (r * [k = T] - kl_k)
    A_t = (R_t - mean(R)) / std(R)          over all tokens of the step

The surrogate is PPO's (``isobit.algorithms.policy_gradient``).

REINFORCE++ with the group's mean as baseline (arXiv 2501.03262, section 3.3).

    a_i = r_i - mean of its group
    A_i = a_i / std(a)                      over all completions of the step

One standard deviation for the step, where GRPO has one a group: a group that is almost always
solved does not weigh more than others.  The mean of a over the step is zero, since it is in each
group, so that none is subtracted and a group of equal rewards has advantages of exactly zero.  (The
authors' code takes mean and deviation over tokens, which weighs long completions more.)  The
divergence from the reference is a k2 term of the loss.  The surrogate is PPO's
(``isobit.algorithms.policy_gradient``).

ReMax: REINFORCE with the reward of the prompt's greedy completion as baseline (arXiv 2310.10505,
algorithm 1).

    A_i = r_i - r(greedy)

The divergence from the reference is taken from the reward of the sample.  The paper's loss is
-A * log pi; PPO's surrogate has its gradient in the first update of a step, and holds the later
ones back.

RLOO: REINFORCE with the other samples' mean as baseline (arXiv 2402.14740, section 3.2).

    A_i = r_i - mean of the others        = G / (G - 1) * (r_i - mean(r))

A baseline that does not hold the sample itself leaves the gradient unbiased.  The divergence from
the reference is taken from the reward, a number for the completion.  The paper's loss is
-A * log pi; PPO's surrogate has its gradient in the first update of a step, and holds the later
ones back.

Weights for tokens that another policy drew than the one that learns.

mu is the policy that drew and recorded, pi_old the trainer's before its update; where engine and
trainer are one function and nothing is stale they are equal.  With rho = pi_old / mu of a token,
and log rho kept within +-20 so that nothing overflows:

    tis        min(max(rho, low), high), of a token or of the product over its sequence ("Your
               efficient RL framework secretly brings you off-policy RL training", Yao et al. 2025)
    mis        rho where it lies in [low, high], else 0; of a token or the product ("When speed
               kills stability", Liu et al. 2025)
               geometric: 1 where exp(mean log rho) of the sequence lies in [low, high], else 0
    icepop     rho where it lies in [low, high], else 0, on both sides (Ant's Ling team, 2025)
    k3         1 where rho - 1 - log rho, of a token or as the mean over its sequence, is at most
               max, else 0: an estimate of KL(mu || pi_old) of what mu drew
    normalise  the weights so far over their mean: over sequences, where each is one weight for a
               whole sequence (the self-normalised estimator over the samples that were drawn), else
               over tokens

The weights of all corrections are multiplied, and the loss multiplies a token's surrogate with what
comes out; no gradient flows through it.  Where rho is 1 everywhere, every weight is exactly 1.
"""

from collections.abc import Callable, Sequence
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
from isobit.config.corrections import (
    Correction,
    IcePopCorrection,
    K3Correction,
    MisCorrection,
    TisCorrection,
)
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.rounding import are_level
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group


@dataclass(frozen=True, slots=True)
class Cispo(PolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: CispoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file; the clip fractions count the weights that are bounded, whatever
        the advantage.
        """
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio = torch.exp(scores.log_probs.detach() - batch.old_log_probs)
        loss = -ratio.clamp(low, high) * batch.advantages * scores.log_probs
        metrics = ratio_metrics(ratio, batch.advantages)
        metrics["clip_fraction/low"] = float((ratio < low).sum())
        metrics["clip_fraction/high"] = float((ratio > high).sum())
        return Terms(loss, metrics)


@dataclass(frozen=True, slots=True)
class Dapo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: DapoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)


@dataclass(frozen=True, slots=True)
class DrGrpo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: DrGrpoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``group_advantages``; without the standard deviation."""
        return group_credit(groups, normalise_by_std=False)


@dataclass(frozen=True, slots=True)
class Grpo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: GrpoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, self.config.normalise_by_std)


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[N] of the sequences numbered in ``sequence`` (int64 [N]) -> [S], S the largest number and
    one; tokens are added in their order.
    """
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def sequence_means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """As ``sequence_sums``, divided by each sequence's number of tokens; 0 where it has none."""
    counts = torch.bincount(sequence).clamp(min=1)
    return sequence_sums(values, sequence) / counts.to(values.dtype)


@dataclass(frozen=True, slots=True)
class Gspo(PolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: GspoConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``group_advantages``."""
        return group_credit(groups, normalise_by_std=True)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file; a sequence lies in one micro-batch."""
        bounds = ClipBounds(self.config.clip_low, self.config.clip_high)
        log_ratio = scores.log_probs - batch.old_log_probs
        ratio = torch.exp(sequence_means(log_ratio, batch.sequence))[batch.sequence]
        loss = clipped_surrogate(ratio, batch.advantages, bounds.clip_low, bounds.clip_high)
        return Terms(loss, ratio_metrics(ratio.detach(), batch.advantages, bounds))


@dataclass(frozen=True, slots=True)
class ReinforcePp(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: ReinforcePpConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See the top of this file; a completion without tokens is left out."""
        return token_credit(groups, self._returns, whiten)

    def _returns(self, sequence: TokenSequence, reward: float) -> tuple[list[float], None]:
        found, following = [], 0.0
        for one in reversed(token_rewards(sequence, reward)):
            following = one + self.config.gamma * following
            found.append(following)
        return found[::-1], None


@dataclass(frozen=True, slots=True)
class ReinforcePpBaseline(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: ReinforcePpBaselineConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See the top of this file."""
        centred = [group_advantages(penalised(group), normalise_by_std=False) for group in groups]
        return columns_of(batch_normalised(centred))


@dataclass(frozen=True, slots=True)
class ReMax(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

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


@dataclass(frozen=True, slots=True)
class Rloo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: RlooConfig

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See ``leave_one_out_advantages``."""
        return columns_of([leave_one_out_advantages(penalised(group)) for group in groups])


LARGEST_LOG_RATIO = 20.0
"""Of a token, and of a sequence; as in verl."""


def correction_weights(
    corrections: Sequence[Correction], log_ratios: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """log rho [N] and the sequences of the N tokens (int64, 0..S-1, of the whole batch) -> the
    weight of each, float32 [N].
    """
    log_rho = log_ratios.double()
    weights = torch.ones_like(log_rho)
    for correction in corrections:
        if correction.type == "normalise":
            of = sequence_means(weights, sequence) if _of_sequences(corrections) else weights
            mean = of.mean()
            weights = weights / mean if mean > 0 else weights
        else:
            weights = weights * _weight(correction, log_rho, sequence)
    return weights.float()


def _of_sequences(corrections: Sequence[Correction]) -> bool:
    """Whether all weights before a normalisation are one for a whole sequence."""
    levels = [getattr(one, "level", "token") for one in corrections if one.type != "normalise"]
    return bool(levels) and "token" not in levels


def _weight(
    correction: TisCorrection | MisCorrection | IcePopCorrection | K3Correction,
    log_rho: torch.Tensor,
    sequence: torch.Tensor,
) -> torch.Tensor:
    match correction:
        case TisCorrection(level=level, min=low, max=high):
            return _ratio(log_rho, sequence, level).clamp(low, high)
        case MisCorrection(level="geometric", bounds=(low, high)):
            mean = _ratio(log_rho, sequence, "geometric")
            return _within(mean, low, high).double()
        case MisCorrection(level=level, bounds=(low, high)):
            ratio = _ratio(log_rho, sequence, level)
            return torch.where(_within(ratio, low, high), ratio, 0.0)
        case IcePopCorrection(min=low, max=high):
            ratio = _ratio(log_rho, sequence, "token")
            return torch.where(_within(ratio, low, high), ratio, 0.0)
        case K3Correction(level=level, max=high):
            bounded = log_rho.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            divergence = torch.expm1(bounded) - bounded
            if level == "sequence":
                divergence = sequence_means(divergence, sequence)[sequence]
            return (divergence <= high).double()


def _ratio(log_rho: torch.Tensor, sequence: torch.Tensor, level: str) -> torch.Tensor:
    """rho of each token, or its product or geometric mean over the token's sequence; [N]."""
    joined: dict[str, Callable[[], torch.Tensor]] = {
        "token": lambda: log_rho,
        "sequence": lambda: sequence_sums(log_rho, sequence)[sequence],
        "geometric": lambda: sequence_means(log_rho, sequence)[sequence],
    }
    return joined[level]().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (values >= low) & (values <= high)


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / (N * sum w^2): the share of the N tokens that weights as uneven as these are
    worth; 1 where all are equal, 0 where all are 0.
    """
    values = weights.double()
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / (values.numel() * squares) if squares else 0.0
