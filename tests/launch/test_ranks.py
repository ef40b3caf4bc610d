"""Which of several ranks that failed is the one that began."""

from collections.abc import Mapping
from typing import Any

import pytest

from isobit.launch.ranks import Rank, RankError, Ranks


class Given(Rank):
    """One whose news come from the test."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.found: Mapping[str, Any] = {}

    @property
    def notes(self) -> Mapping[str, Any]:
        return self.found

    @property
    def failed_at(self) -> float:
        return 0.0

    @property
    def code(self) -> int:
        return 1

    def is_running(self) -> bool:
        return self.exit_code is None

    def send(self, number: int) -> None:
        self.exit_code = -number

    def describe(self) -> str:
        return f"rank {self.number} is gone"

    def close(self) -> None:
        pass


def test_one_that_is_lost_while_it_is_listened_to_is_the_one() -> None:
    ranks = [Given(0), Given(1)]

    def hear() -> None:
        ranks[1].exit_code = 1

    with pytest.raises(RankError, match="rank 1 is gone") as failed:
        Ranks(ranks, hear).run()
    assert failed.value.died


def test_a_death_is_found_at_the_next_look_and_the_others_are_asked_to_end() -> None:
    ranks, looks, asked_at = [Given(0), Given(1)], list[int](), list[int]()

    def hear() -> None:
        looks.append(1)
        if len(looks) == 3:
            ranks[1].exit_code = -9

    def send(number: int) -> None:
        asked_at.append(len(looks))
        ranks[0].exit_code = -number

    ranks[0].send = send
    with pytest.raises(RankError):
        Ranks(ranks, hear).run()
    assert asked_at == [3]


@pytest.mark.parametrize(
    ("notes", "exit_code", "died"),
    [
        ({}, -9, True),
        ({"fault": "ValueError"}, 1, True),
        ({"error": "the disk is full"}, 2, False),
        ({}, 2, False),
        ({"error": "hangs", "verdict": [1, "rank 1 is silent"]}, 4, True),
    ],
)
def test_what_a_rank_knew_is_not_its_death(
    notes: Mapping[str, Any], exit_code: int, died: bool
) -> None:
    rank = Given(0)
    rank.found, rank.exit_code = notes, exit_code
    with pytest.raises(RankError) as failed:
        Ranks([rank], lambda: None).run()
    assert failed.value.died == died
