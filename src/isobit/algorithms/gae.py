"""Rewards, returns and advantages of single tokens.

The reward of a completion is given at its last token; a penalty for the divergence from the
reference is taken at each.  Generalised advantage estimation (arXiv 1506.02438, equation 16), with
V the value before each token and 0 behind the last:

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t     = delta_t + gamma * lam * A_{t+1}        the value head learns A_t + V_t
"""

from collections.abc import Callable, Sequence

from isobit.algorithms.objective import Credit, Judged, JudgedGroup


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
