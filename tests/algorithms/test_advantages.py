"""Group advantages: the formula, and the cases where the formula alone would go wrong.

DAPO's soft punishment, by its equation.
"""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.algorithms.advantages import (
    STD_EPSILON,
    group_advantages,
    leave_one_out_advantages,
    overlong_punishment,
    whiten,
)
from isobit.algorithms.family import _above

FLOAT32_TENTH = float(torch.tensor(0.1))
rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10, width=32)), max_size=12)


@pytest.mark.parametrize("reward", [0.0, 0.1, FLOAT32_TENTH, 1 / 3, -2.5, 1e30])
@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, normalise: bool) -> None:
    assert group_advantages([reward] * 8, normalise) == [0.0] * 8


def test_equal_rewards_beside_an_excluded_one_give_exactly_zero() -> None:
    assert group_advantages([0.1, None, 0.1, 0.1], True) == [0.0, None, 0.0, 0.0]


def test_values_against_the_formula() -> None:
    values = [0.0, 1.0, 1.0, 0.25]
    mean, std = statistics.mean(values), statistics.stdev(values)
    expected = [(value - mean) / (std + STD_EPSILON) for value in values]
    assert group_advantages(values, True) == pytest.approx(expected, rel=1e-14)
    assert group_advantages(values, False) == pytest.approx(
        [value - mean for value in values], rel=1e-14
    )


def test_excluded_rewards_take_no_part() -> None:
    with_gaps = group_advantages([None, 0.0, None, 1.0, 3.0], True)
    without = group_advantages([0.0, 1.0, 3.0], True)
    assert [with_gaps[0], with_gaps[2]] == [None, None]
    assert [with_gaps[1], with_gaps[3], with_gaps[4]] == without


@pytest.mark.parametrize("group", [[], [1.0], [None], [None, 1.0, None]])
def test_fewer_than_two_valid_rewards_are_excluded(group: list[float | None]) -> None:
    assert group_advantages(group, True) == [None] * len(group)


@pytest.mark.parametrize("normalise", [True, False])
def test_rewards_that_differ_by_rounding_give_exactly_zero(normalise: bool) -> None:
    rewards = [0.3, 0.1 * 3, None, 0.1 + 0.2]
    assert group_advantages(rewards, normalise) == [0.0, 0.0, None, 0.0]
    assert leave_one_out_advantages(rewards) == [0.0, 0.0, None, 0.0]
    assert whiten([rewards[:2], rewards[3:]]) == [(0.0, 0.0), (0.0,)]
    assert _above([0.3, 1.0, None], 0.1 * 3) == [0.0, 1.0 - 0.1 * 3, None]


@given(rewards, st.booleans())
def test_advantages_are_finite_centred_and_ordered_like_rewards(
    group: list[float | None], normalise: bool
) -> None:
    advantages = group_advantages(group, normalise)
    pairs = [
        (reward, advantage)
        for reward, advantage in zip(group, advantages, strict=True)
        if advantage is not None and reward is not None
    ]
    assert all(math.isfinite(advantage) for _, advantage in pairs)
    assert abs(sum(advantage for _, advantage in pairs)) < 1e-6
    assert [reward for reward, _ in sorted(pairs)] == [
        reward for reward, _ in sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    ]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_the_papers_lengths(length: int, expected: float) -> None:
    assert overlong_punishment(length, 20480, 4096) == expected
    assert overlong_punishment(length, 20480, 4096, 0.5) == 0.5 * expected
