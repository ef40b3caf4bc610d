"""Figures of an evaluation from the scores of its samples, with 95% intervals; pure functions of
numbers.

The problem is the unit of sampling: several samples of one problem are averaged first, so that they
do not count as independent evidence (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640,
section 2.2).

    pass@k      mean over problems of 1 - C(n - c, k) / C(n, k): n samples, c of them right;
                unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1)
    Wilson 1927, one score of 0 or 1 a problem:  (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2))
                                                 / (1 + z^2/n)
    normal, any other scores:                    m +- z s / sqrt(n), s the standard deviation over
                                                 problems

Wilson keeps its coverage at 0% and 100% and for few problems, where the normal interval shrinks to
nothing.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Interval = tuple[float, float]

Z_95 = 1.959963984540054


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of ``k`` samples is right, estimated from ``right`` of
    ``samples``; 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson_interval(right: int, problems: int) -> Interval:
    """The 95% score interval of a proportion; (0, 1) without problems."""
    if problems == 0:
        return 0.0, 1.0
    share, spread = right / problems, Z_95**2 / problems
    middle = share + spread / 2
    half = Z_95 * math.sqrt(share * (1 - share) / problems + spread / (4 * problems))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def normal_interval(scores: Sequence[float]) -> Interval:
    """The 95% interval of the mean of at least two problems' scores, which may be any finite
    numbers.
    """
    half = Z_95 * stdev(scores) / math.sqrt(len(scores))
    mean = fmean(scores)
    return mean - half, mean + half


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Wilson's interval where every problem scored 0 or 1, else the normal one; None where there is
    too little to say.
    """
    if scores and all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(sum(score == 1.0 for score in scores), len(scores))
    return normal_interval(scores) if len(scores) > 1 else None
