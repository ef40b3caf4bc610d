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
