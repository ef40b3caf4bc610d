"""Advantages: how much better a completion did than the others of its prompt, or of its step.

group_advantages          rewards against the mean of the group: GRPO, Dr. GRPO
leave_one_out_advantages  against the mean of the others: RLOO
turn_credit               returns of each turn of an episode against those of the group
advantages_and_returns    of single tokens, with a value head: generalised advantage estimation
overlong_punishment       reward lost by a completion that nears the length limit
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from isobit.algorithms.objective import Columns
from isobit.records.rounding import are_level
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group

STD_EPSILON = 1e-6
"""Keeps rewards that differ by rounding only from becoming advantages of order one."""


def group_advantages(rewards: Sequence[float | None], normalise_by_std: bool) -> list[float | None]:
    """Rewards of the samples of one prompt -> one advantage each, in the same order.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), for the rewards r_1 .. r_G:

        A_i = (r_i - mean(r)) / (std(r) + epsilon)

    Dr. GRPO (arXiv 2503.20783, section 3) leaves out the division, which weighs questions that are
    almost always or almost never solved more than the others.  The standard deviation is the
    unbiased one (G - 1), as in the published implementations.

    A reward of None is excluded: it takes no part in mean and deviation, and its advantage is None.
    A single valid reward has nothing to be compared with: with fewer than two, all advantages are
    None.  If all valid rewards are equal but for rounding (``isobit.records.rounding``) the
    advantages are exactly 0; computed from the formula, a remainder would be left (eight times 0.1
    in float32: 0.007).
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2:
        return [None] * len(rewards)
    if are_level(valid):
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
    zeros where all are equal but for rounding.  Sums are rounded once: their order does not matter.
    """
    flat = [value for one in values for value in one]
    if are_level(flat):
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
    """Each completion's reward and those of its turns, less the sum of its penalties for the
    divergence from the reference.
    """
    return [
        None if reward is None else reward - math.fsum(_taken(completion.sequence))
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def _taken(sequence: TokenSequence) -> list[float]:
    """What is taken from the reward of a completion: penalties, and rewards of turns negated."""
    return [*_penalties(sequence), *(-one for one in _turn_rewards(sequence) if one)]


def _penalties(sequence: TokenSequence) -> list[float]:
    """One for each response token; empty where no penalty is in the reward."""
    kl = sequence.kl_penalties
    return [] if kl is None else sequence.of_response(kl).tolist()


def _turn_rewards(sequence: TokenSequence) -> list[float]:
    """One for each response token, 0 at all but the last of a turn; empty where turns have none."""
    given = sequence.turn_rewards
    return [] if given is None else sequence.of_response(given).tolist()


def token_rewards(sequence: TokenSequence, reward: float) -> list[float]:
    """The reward of each of its n response tokens, at least one: of a turn at its last, of the
    completion at the last of all.  A penalty for the divergence from the reference is taken at
    each.
    """
    nothing = [0.0] * sequence.response_length
    kl, turns = _penalties(sequence) or nothing, _turn_rewards(sequence) or nothing
    rewards = [turn - one if one else turn for one, turn in zip(kl, turns, strict=True)]
    rewards[-1] += reward
    return rewards


def turn_credit(
    groups: Sequence[Group],
    credit: Callable[[Sequence[Group]], list[list[Columns | None]]],
    gamma: float,
) -> list[list[Columns | None]]:
    """What an algorithm's ``credit``, one advantage for all tokens, gives for the returns of each
    turn, at the tokens of that turn.

    An environment may give rewards to the turns of an episode.  They are part of the return of the
    whole episode, or with ``algorithm.credit = "turn"`` each turn has a return of its own.  With
    r_t the reward of turn t of n, less its penalties, and the episode's reward in that of the last
    turn:

        R_t = r_t + gamma * R_{t+1}     the return from turn t on (GTPO, arXiv 2511.14846)
        A_t                             the algorithm's advantage of R_t among the group's at turn t

    An episode that has ended before turn t counts there with the return of its last turn, so that
    every baseline is over all episodes of the group.  With gamma 1 and a reward at the end alone,
    each turn has the advantage that the whole episode would have.
    """
    returns = [_returns_of(group, gamma) for group in groups]
    plain = [_without(group, "kl_penalties", "turn_rewards") for group in groups]
    last = max((len(one) for group in returns for one in group if one is not None), default=1)
    by_turn = [
        credit(
            [
                replace(group, rewards=[_at(one, turn) for one in found])
                for group, found in zip(plain, returns, strict=True)
            ]
        )
        for turn in range(last)
    ]
    return [
        [
            _spread(completion.sequence, [turn[place][index] for turn in by_turn])
            for index, completion in enumerate(group.completions)
        ]
        for place, group in enumerate(groups)
    ]


def is_zero_variance(group: Group, gamma: float | None = None) -> bool:
    """Whether no two of its completions with a reward have different returns, or with ``gamma``
    different ones from any turn on, before penalties and but for rounding: then it gives no signal.
    """
    plain = _without(group, "kl_penalties")
    whole = [None if one is None else [one] for one in penalised(plain)]
    returns = whole if gamma is None else _returns_of(plain, gamma)
    found = [one for one in returns if one is not None]
    last = max(map(len, found), default=0)
    return all(are_level(one[min(turn, len(one) - 1)] for one in found) for turn in range(last))


def _returns_of(group: Group, gamma: float) -> list[list[float] | None]:
    """The returns of each completion with a reward."""
    return [
        None if reward is None else _returns(completion.sequence, reward, gamma)
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def _returns(sequence: TokenSequence, reward: float, gamma: float) -> list[float]:
    """R_1 .. R_n of n turns, at least one.  Each sum is rounded once, so that the order of rewards
    does not matter where nothing is discounted.
    """
    kl = _penalties(sequence)
    turns = _turn_rewards(sequence)
    begin = 0
    rewards = list[float]()
    for length in sequence.turn_lengths or [0]:
        span = slice(begin, begin + length)
        rewards.append(math.fsum(turns[span]) - math.fsum(kl[span]))
        begin += length
    rewards[-1] += reward
    return [
        math.fsum(gamma**later * one for later, one in enumerate(rewards[turn:]))
        for turn in range(len(rewards))
    ]


def _at(returns: Sequence[float] | None, turn: int) -> float | None:
    """The return from turn number ``turn`` on, from 0; after the last turn that of the last."""
    return None if returns is None else returns[min(turn, len(returns) - 1)]


def _without(group: Group, *columns: str) -> Group:
    """The group without columns of its sequences."""
    nothing = dict.fromkeys(columns)
    completions = [
        replace(one, sequence=one.sequence.with_columns(**nothing)) for one in group.completions
    ]
    return replace(group, completions=completions)


def _spread(sequence: TokenSequence, by_turn: Sequence[Columns | None]) -> Columns | None:
    """The advantages of the turns that a completion has, at their tokens; None where one is None,
    and one number where all are equal.
    """
    lengths = sequence.turn_lengths or [0]
    found = list[float]()
    for columns in by_turn[: len(lengths)]:
        if columns is None:
            return None
        advantage = columns["advantages"]
        assert isinstance(advantage, int | float), "an algorithm by turn gives one advantage"
        found.append(advantage)
    if len(set(found)) == 1:
        return {"advantages": found[0]}
    pairs = zip(found, lengths, strict=True)
    return {"advantages": [advantage for advantage, length in pairs for _ in range(length)]}


def advantages_and_returns(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """n rewards and n values -> n advantages and n returns, by generalised advantage estimation
    (arXiv 1506.02438, equation 16), with V the value before each token and 0 behind the last:

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}        the value head learns A_t + V_t
    """
    advantages = []
    following = 0.0
    next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        following = delta + gamma * lam * following
        next_value = value
        advantages.append(following)
    advantages.reverse()
    return advantages, [a + value for a, value in zip(advantages, values, strict=True)]


def token_credit(
    groups: Sequence[Group],
    estimate: Callable[[TokenSequence, float], tuple[list[float], list[float] | None]],
    normalise: Callable[[Sequence[Sequence[float]]], list[tuple[float, ...]]],
) -> list[list[Columns | None]]:
    """Advantages (and returns, or None) of each completion and its reward by ``estimate``, the
    advantages of all together by ``normalise``; a completion without reward or tokens is left out.
    """
    counted, found = list[tuple[int, int]](), list[tuple[list[float], list[float] | None]]()
    for place, group in enumerate(groups):
        pairs = zip(group.completions, group.rewards, strict=True)
        for index, (completion, reward) in enumerate(pairs):
            if reward is not None and completion.length > 0:
                counted.append((place, index))
                found.append(estimate(completion.sequence, reward))
    advantages = normalise([one for one, _ in found])
    credit: list[list[Columns | None]] = [[None] * len(group.completions) for group in groups]
    for (place, index), advantage, (_, returns) in zip(counted, advantages, found, strict=True):
        columns: Columns = {"advantages": advantage}
        credit[place][index] = columns if returns is None else {**columns, "returns": returns}
    return credit


def overlong_punishment(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a completion of ``length`` tokens that nears the ``limit``: 0
    or below (DAPO, arXiv 2503.14476, equation 13).  With L the limit and B the buffer, ``factor``
    times

        0                       n <= L - B
        -(n - (L - B)) / B      up to L, where it is -1
    """
    beyond = min(max(length - (limit - buffer), 0), buffer)
    return -factor * beyond / buffer if beyond else 0.0
