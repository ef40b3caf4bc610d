"""Which completions of a step are written, and what beside them."""

import pytest

from isobit.observe.training_log import best_and_worst


@pytest.mark.parametrize(
    ("rewards", "places"),
    [
        ([0.0, 1.0, 0.5, 1.0, 0.0], [0, 1]),
        ([0.5, 1.0, 0.0], [1, 2]),
        ([None, 0.0, 1.0], [1, 2]),
        ([0.5, 0.5], [0]),
        ([0.3, 0.1 * 3], [0]),
        ([None, 0.5], [0]),
        ([None, None], [0]),
        ([1.0], [0]),
    ],
)
def test_the_best_and_the_worst_are_written_where_rewards_differ(
    rewards: list[float | None], places: list[int]
) -> None:
    assert best_and_worst(rewards) == places
