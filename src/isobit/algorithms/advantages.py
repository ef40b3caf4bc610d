"""Advantages relative to a group: how much better a sample did than the other samples of its
prompt.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), for the rewards r_1 .. r_G of one prompt:

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

Dr. GRPO (arXiv 2503.20783, section 3) leaves out the division, which weighs questions that are
almost always or almost never solved more than the others.  The standard deviation is the unbiased
one (G - 1), as in the published implementations.
"""

import math
from collections.abc import Sequence
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
