"""95% intervals of means over problems, and pass@k.

The problem is the unit of sampling: several samples of one problem are averaged first, so that they
do not count as independent evidence (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640,
section 2.2).

    pass@k      mean over problems of 1 - C(n - c, k) / C(n, k): n samples, c of them right;
                unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1)
    Wilson 1927, one score of 0 or 1 a problem:  (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2))
                                                 / (1 + z^2/n)
    bootstrap, any other scores: 2.5% and 97.5% of the means of n scores that are drawn from the n
                                 at random, with replacement (Efron 1979, Annals of Statistics 7:1)

Wilson keeps its coverage at 0% and 100% and for few problems.  The bootstrap stays within the
scores: the normal interval, m +- z s / sqrt(n), reaches below 0 where most partial credits are 0.
"""

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean

Interval = tuple[float, float]

Z_95 = 1.959963984540054

_RESAMPLES = 1000
"""0.1 s for 1,000 problems."""


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
    low = (middle - half) / (1 + spread) if right else 0.0  # 0 and 1 without rounding
    return low, (middle + half) / (1 + spread) if right < problems else 1.0


def bootstrap_interval(scores: Sequence[float]) -> Interval:
    """The 95% interval of the mean of at least two problems' scores, which may be any finite
    numbers; the same for the same scores in the same order.
    """
    random, count = Random(0), len(scores)  # noqa: S311 - no secret
    means = sorted(fmean(random.choices(scores, k=count)) for _ in range(_RESAMPLES))
    outside = _RESAMPLES // 40
    return means[outside], means[-1 - outside]


def paired_interval(differences: Sequence[float]) -> Interval:
    """The 95% bootstrap interval of the mean of paired differences of at least two problems, no
    nearer to the mean than Wilson's bound of an event that was never seen: few problems, or none
    whose answer changes, prove little.
    """
    mean, least = fmean(differences), wilson_interval(0, len(differences))[1]
    low, high = bootstrap_interval(differences)
    return min(low, mean - least), max(high, mean + least)


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Wilson's interval where every problem scored 0 or 1, else the bootstrap's, or None for fewer
    than two scores.
    """
    if scores and all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(sum(score == 1.0 for score in scores), len(scores))
    return bootstrap_interval(scores) if len(scores) > 1 else None
