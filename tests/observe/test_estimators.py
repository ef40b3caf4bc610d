"""Estimators against brute force and published figures."""

import math
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from isobit.observe.estimators import (
    bootstrap_interval,
    mean_interval,
    pass_at_k,
    wilson_interval,
)


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int, right: int) -> None:
    outcomes = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        assert pass_at_k(samples, right, k) == pytest.approx(
            fmean(any(subset) for subset in combinations(outcomes, k))
        )


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("right", "problems", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_gives_newcombes_figures(
    right: int, problems: int, low: float, high: float
) -> None:
    """Newcombe 1998, Statistics in Medicine 17:857, table I, method 3."""
    assert wilson_interval(right, problems) == pytest.approx((low, high), abs=5e-5)


def test_bootstrap_interval_is_near_the_normal_one_for_many_even_scores() -> None:
    scores = [index / 400 for index in range(401)]
    low, high = bootstrap_interval(scores)
    half = 1.959964 * pstdev(scores) / math.sqrt(len(scores))
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.1 * half)
    assert (low, high) == bootstrap_interval(scores)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_interval_of_partial_credits_stays_within_them(sign: float) -> None:
    """The normal one is -1.4% to 9.4% here."""
    scores = [sign * score for score in [0.0] * 23 + [0.5, 0.5]]
    low, high = sorted(abs(end) for end in bootstrap_interval(scores))
    assert 0.0 <= low < 0.04 < high <= 0.5


def test_mean_interval_chooses_by_the_scores() -> None:
    assert mean_interval([0.0, 1.0, 1.0]) == wilson_interval(2, 3)
    assert mean_interval([0.0, 0.5, 1.0]) == bootstrap_interval([0.0, 0.5, 1.0])
    assert mean_interval([0.5]) is None
    assert mean_interval([]) is None
