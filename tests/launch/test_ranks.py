"""Which of several ranks that failed is the one that began."""

import os
import signal
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_run_that_was_asked_to_stop_is_not_started_again(
    number: signal.Signals, is_before: bool
) -> None:
    """Also where the signal comes while the others are ended; one to save asks for no stop."""
    ranks, looks = [Given(0), Given(1)], list[int]()
    ranks[0].send = lambda number: None

    def hear() -> None:
        looks.append(1)
        if len(looks) == 2 - is_before:
            os.kill(os.getpid(), number)
        if len(looks) == 1 + is_before:
            ranks[1].exit_code = -9
        if len(looks) == 4:
            ranks[0].exit_code = 128 + number

    ranks[1].send = lambda number: None
    with pytest.raises(RankError, match="rank 1 is gone") as failed:
        Ranks(ranks, hear).run()
    assert failed.value.died == (number == signal.SIGUSR1)


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


BOARD = "who keeps the board of the run gives no answer"


@pytest.mark.parametrize(
    ("notes", "exit_code", "verdict", "reason", "died"),
    [
        ({"error": "no such key"}, 2, None, "^rank 0: no such key$", False),
        ({}, -9, None, "^rank 0 is gone$", True),
        ({"fault": "ValueError"}, 1, None, "^rank 0 is gone$", True),
        ({}, 2, None, "^rank 0 is gone$", False),
        ({}, 4, None, BOARD, True),
        ({"lost": "broken pipe"}, 4, None, BOARD, True),
        ({}, -9, 0, BOARD, True),
        ({"error": "the disk is full"}, -9, 0, "^rank 0: the disk is full$", False),
        ({"error": "the disk is full"}, 2, 1, "^rank 0: the disk is full$", False),
    ],
)
def test_what_others_find_of_a_rank_that_ended_by_itself_is_not_the_reason(
    notes: Mapping[str, Any], exit_code: int, verdict: int | None, reason: str, died: bool
) -> None:
    """Rank 0 keeps the board, whose end the watch of another notices."""
    ranks = [Given(0), Given(1)]
    ranks[0].found, ranks[0].exit_code = notes, exit_code
    ranks[1].found, ranks[1].exit_code = {"verdict": [verdict, BOARD]}, 4
    with pytest.raises(RankError, match=reason) as failed:
        Ranks(ranks, lambda: None).run()
    assert failed.value.died == died
