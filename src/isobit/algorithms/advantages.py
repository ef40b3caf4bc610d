"""Advantages relative to a group: how much better a sample did than the other samples of its
prompt.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), for the rewards r_1 .. r_G of one prompt:

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

Dr. GRPO (arXiv 2503.20783, section 3) leaves out the division, which weighs questions that are
almost always or almost never solved more than the others.  The standard deviation is the unbiased
one (G - 1), as in the published implementations.

Rewards, returns and advantages of single tokens.

The reward of a completion is given at its last token; a penalty for the divergence from the
reference is taken at each.  Generalised advantage estimation (arXiv 1506.02438, equation 16), with
V the value before each token and 0 behind the last:

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t     = delta_t + gamma * lam * A_{t+1}        the value head learns A_t + V_t

The soft punishment of completions that near the length limit (DAPO, arXiv 2503.14476, equation
13).

With L the limit and B the buffer, for a completion of n tokens:

    0                       n <= L - B
    -(n - (L - B)) / B      up to L, where it is -1

times a factor.  It is added to the reward.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from isobit.algorithms.objective import Credit, Judged, JudgedGroup

STD_EPSILON = 1e-6
"""Keeps rewards that differ by rounding only from becoming advantages of order one."""


def group_advantages(rewards: Sequence[float | None], normalise_by_std: bool) -> list[float | None]:
    """Rewards of the samples of one prompt -> one advantage each, in the same order.

    A reward of None is excluded: it takes no part in mean and deviation, and its advantage is None.
    A single valid reward has nothing to be compared with: with fewer than two, all advantages are
    None.  If all valid rewards are equal the advantages are exactly 0; computed from the formula,
    rounding would leave a remainder (eight times 0.1 in float32: 0.007).
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2:
        return [None] * len(rewards)
    if min(valid) == max(valid):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = fmean(valid)
    scale = 1.0
    if normalise_by_std:
        scale = (
            math.hypot(*(reward - mean for reward in valid)) / math.sqrt(len(valid) - 1)
            + STD_EPSILON
        )
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Each reward less the mean of the others' (RLOO, arXiv 2402.14740); None, exact zeros and
    single rewards are as in ``group_advantages``.
    """
    valid = sum(reward is not None for reward in rewards)
    centred = group_advantages(rewards, normalise_by_std=False)
    return [None if a is None else a * valid / (valid - 1) for a in centred]


def whiten(values: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """The values of all completions together centred and divided by their standard deviation; exact
    zeros where all are equal.  Sums are rounded once, so that their order does not matter.
    """
    flat = [value for one in values for value in one]
    if not flat or min(flat) == max(flat):
        return [(0.0,) * len(one) for one in values]
    mean = math.fsum(flat) / len(flat)
    scale = _deviation([value - mean for value in flat])
    return [tuple([(value - mean) / scale for value in one]) for one in values]


def batch_normalised(
    groups: Sequence[Sequence[float | None]],
) -> list[list[float | None]]:
    """Advantages that are centred in each group, divided by their standard deviation over all;
    zeros stay exactly zero.
    """
    flat = [a for group in groups for a in group if a is not None]
    if not any(flat):
        return [list(group) for group in groups]
    scale = _deviation(flat)
    return [[None if a is None else a / scale for a in group] for group in groups]


def _deviation(centred: Sequence[float]) -> float:
    """The unbiased standard deviation, and the epsilon."""
    variance = math.fsum(value * value for value in centred) / (len(centred) - 1)
    return math.sqrt(variance) + STD_EPSILON


def group_credit(
    groups: Sequence[JudgedGroup], normalise_by_std: bool
) -> list[list[Credit | None]]:
    """``group_advantages`` of each group of a step, from the rewards less their penalties."""
    found = [group_advantages(penalised(group), normalise_by_std) for group in groups]
    return [[None if a is None else Credit(a) for a in group] for group in found]


def penalised(group: JudgedGroup) -> list[float | None]:
    """Each sample's reward less the sum of its penalties for the divergence from the reference."""
    return [_penalised(one) for one in group.samples]


def _penalised(judged: Judged) -> float | None:
    if judged.reward is None or judged.kl is None:
        return judged.reward
    return judged.reward - math.fsum(judged.kl)


def token_rewards(judged: Judged) -> list[float]:
    """The reward of each of its n tokens; of a completion with a reward and at least one token."""
    assert judged.reward is not None, "an excluded completion has no rewards"
    kl = judged.kl if judged.kl is not None else [0.0] * judged.length
    assert len(kl) == judged.length > 0, "a penalty for each token"
    rewards = [-one if one else 0.0 for one in kl]
    rewards[-1] += judged.reward
    return rewards


def advantages_and_returns(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """n rewards and n values -> n advantages and n returns; the formula is at the top of this
    file.
    """
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        following = delta + gamma * lam * following
        next_value = value
        advantages.append(following)
    advantages.reverse()
    return advantages, [a + value for a, value in zip(advantages, values, strict=True)]


def token_credit(
    groups: Sequence[JudgedGroup],
    judge: Callable[[Judged], tuple[list[float], list[float] | None]],
    normalise: Callable[[Sequence[Sequence[float]]], list[tuple[float, ...]]],
) -> list[list[Credit | None]]:
    """Advantages (and returns, or None) of each completion by ``judge``, the advantages of all
    together by ``normalise``; a completion without reward or tokens is left out.
    """
    counted = [
        (place, index)
        for place, group in enumerate(groups)
        for index, one in enumerate(group.samples)
        if one.reward is not None and one.length > 0
    ]
    found = [judge(groups[place].samples[index]) for place, index in counted]
    advantages = normalise([one for one, _ in found])
    credit: list[list[Credit | None]] = [[None] * len(group.samples) for group in groups]
    for (place, index), advantage, (_, returns) in zip(counted, advantages, found, strict=True):
        credit[place][index] = Credit(advantage, None if returns is None else tuple(returns))
    return credit


def overlong_punishment(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a completion of ``length`` tokens: 0 or below."""
    beyond = min(max(length - (limit - buffer), 0), buffer)
    return -factor * beyond / buffer if beyond else 0.0
