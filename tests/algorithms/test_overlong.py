"""DAPO's soft punishment, by its equation."""

import pytest

from isobit.algorithms.overlong import overlong_punishment


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_the_papers_lengths(length: int, expected: float) -> None:
    assert overlong_punishment(length, 20480, 4096) == expected
    assert overlong_punishment(length, 20480, 4096, 0.5) == 0.5 * expected
