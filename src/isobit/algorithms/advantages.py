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

from isobit.algorithms.objective import Columns
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group

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


def columns_of(advantages: Sequence[Sequence[float | None]]) -> list[list[Columns | None]]:
    """One advantage for all tokens of each completion; None leaves it out."""
    return [[None if a is None else {"advantages": a} for a in group] for group in advantages]


def group_credit(groups: Sequence[Group], normalise_by_std: bool) -> list[list[Columns | None]]:
    """``group_advantages`` of each group of a step, from the rewards less their penalties."""
    return columns_of([group_advantages(penalised(group), normalise_by_std) for group in groups])


def penalised(group: Group) -> list[float | None]:
    """Each completion's reward less the sum of its penalties for the divergence from the
    reference.
    """
    return [
        None if reward is None else reward - math.fsum(_penalties(completion.sequence))
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def _penalties(sequence: TokenSequence) -> list[float]:
    """One for each response token; empty where no penalty is in the reward."""
    kl = sequence.kl_penalties
    return [] if kl is None else sequence.of_response(kl).tolist()


def token_rewards(sequence: TokenSequence, reward: float) -> list[float]:
    """The reward of each of its n response tokens, at least one."""
    kl = _penalties(sequence) or [0.0] * sequence.response_length
    rewards = [-one if one else 0.0 for one in kl]
    rewards[-1] += reward
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
    groups: Sequence[Group],
    judge: Callable[[TokenSequence, float], tuple[list[float], list[float] | None]],
    normalise: Callable[[Sequence[Sequence[float]]], list[tuple[float, ...]]],
) -> list[list[Columns | None]]:
    """Advantages (and returns, or None) of each completion and its reward by ``judge``, the
    advantages of all together by ``normalise``; a completion without reward or tokens is left out.
    """
    counted, found = list[tuple[int, int]](), list[tuple[list[float], list[float] | None]]()
    for place, group in enumerate(groups):
        pairs = zip(group.completions, group.rewards, strict=True)
        for index, (completion, reward) in enumerate(pairs):
            if reward is not None and completion.length > 0:
                counted.append((place, index))
                found.append(judge(completion.sequence, reward))
    advantages = normalise([one for one, _ in found])
    credit: list[list[Columns | None]] = [[None] * len(group.completions) for group in groups]
    for (place, index), advantage, (_, returns) in zip(counted, advantages, found, strict=True):
        columns: Columns = {"advantages": advantage}
        credit[place][index] = columns if returns is None else {**columns, "returns": returns}
    return credit


def overlong_punishment(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a completion of ``length`` tokens: 0 or below."""
    beyond = min(max(length - (limit - buffer), 0), buffer)
    return -factor * beyond / buffer if beyond else 0.0
