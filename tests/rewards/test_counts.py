"""What graders met, counted."""

from isobit.rewards.counts import count, take


def test_counts_are_taken_once() -> None:
    take()
    count("code: time limit")
    count("code: time limit")
    count("code: no block")
    assert take() == {"code: time limit": 2, "code: no block": 1}
    assert take() == {}
