"""Rewards that are equal but for rounding, and those that are not."""

import numpy as np
import pytest

from isobit.records.rounding import are_level, rounded_sum, settled

F = {one: float(np.float32(one)) for one in (0.1, 0.3, 0.35)}


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [0.3, 0.1 * 3],
        [0.0, 0.1 + 0.2 - 0.3],
        [1.0, sum([0.1] * 10)],
        [-0.7, -(0.1 * 7)],
        [1e12 / 3, 1e12 / 3 + 2e-4],
        [0.35, F[0.35]],
        [F[0.3], float(np.float32(0.1) * np.float32(3))],
        [0.0, -0.0],
    ],
)
def test_what_differs_by_rounding_is_level(values: list[float]) -> None:
    assert are_level(values)
    assert are_level(reversed(values))


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 1.0],
        [1.0, 1.0 + 1e-9],
        [0.3, 0.3 + 1e-12],
        [1e6, 1e6 + 0.5],
        [16777216.0, 16777218.0],
        [2.0**53, 2.0**53 + 2],
        [F[0.35], F[0.35] * (1 + 2e-6)],
        [1e-9, 2e-9],
        [-4096.0, -4097.0],
        [0.3, 0.3, 0.1 * 3, 0.4],
    ],
)
def test_what_a_reward_says_is_not_rounding(values: list[float]) -> None:
    assert not are_level(values)
    assert not are_level(reversed(values))


def test_sums_that_cancel_are_zero_and_marks_are_met() -> None:
    assert rounded_sum([0.1 * 1000, 0.2 * 1000, -0.3 * 1000]) == 0.0
    assert rounded_sum([0.1, 0.2]) == 0.1 + 0.2 and rounded_sum([]) == 0.0
    assert rounded_sum([1.0, -1.0 + 1e-9]) == 1.0 + (-1.0 + 1e-9)
    assert settled(sum([0.1] * 10), 0.0, 1.0) == 1.0
    assert settled(0.999, 0.0, 1.0) == 0.999
