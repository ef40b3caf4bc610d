"""Who is found out, when, and who is not."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import pytest

from isobit.parallel.black_box import BlackBox
from isobit.parallel.processes import Processes
from isobit.parallel.restart_page import RestartPage
from isobit.parallel.watch import Diagnosis, Limits, Sign, Watch, _machine
from isobit.parallel.world import Pulse

COMPUTES = Sign("box", "m", 100, 1, 1, "training", True, 10.0, None)
WAITS = replace(COMPUTES, process=101, waits_for="all_gather_rows")


def seconds_until(
    first: Sign, second: Sign, are_heard: bool = True, second_is_heard: bool = True
) -> tuple[int, str]:
    """How long two ranks may stay as they are, and what is said then; 4000 s for ever."""
    diagnosis = Diagnosis(Limits(), (0, 1))
    for now in range(4000):
        signs = {
            0: replace(first, number=now if are_heard else 0),
            1: replace(second, number=now if are_heard and second_is_heard else 0),
        }
        verdict = diagnosis.look(now, signs, [])
        if verdict is not None:
            return now, verdict.text
    return 4000, ""


def test_who_waits_is_not_late_and_who_computes_is() -> None:
    found, text = seconds_until(WAITS, COMPUTES)
    assert found == 62
    assert text == "rank 1 (box, process 100) has been silent in training for 62 s: ended"


def test_three_times_the_slowest_of_any_rank() -> None:
    assert seconds_until(replace(WAITS, slowest=50.0), COMPUTES)[0] == 150
    elsewhere = replace(WAITS, slowest=50.0, phase="rollout")
    assert seconds_until(elsewhere, COMPUTES)[0] == 62


def test_a_phase_for_the_first_time_may_take_long() -> None:
    found, text = seconds_until(WAITS, replace(COMPUTES, knows_phase=False, phase="loading"))
    assert (found, "in loading" in text) == (1800, True)


def test_a_rank_without_a_sign_is_found_first_though_another_makes_no_progress() -> None:
    found, text = seconds_until(COMPUTES, COMPUTES, second_is_heard=False)
    assert (found, text.split(" (")[0]) == (60, "rank 1")


def test_ranks_that_have_come_apart() -> None:
    found, text = seconds_until(WAITS, replace(WAITS, waits_for="all_gather"))
    assert found == 60
    assert "rank 0 (box) for all_gather_rows, rank 1 (box) for all_gather" in text
    assert seconds_until(WAITS, WAITS)[0] == 600
    found, text = seconds_until(WAITS, replace(WAITS, has_left=True))
    assert (found, text.endswith("rank 1 has left")) == (60, True)


def test_progress_is_all_it_takes() -> None:
    diagnosis = Diagnosis(Limits(), (0, 1))
    for now in range(1000):
        late = replace(COMPUTES, number=now, beats=now // 61)
        assert diagnosis.look(now, {0: replace(WAITS, number=now), 1: late}, []) is None


def test_a_process_that_is_gone() -> None:
    look = Diagnosis(Limits(), (0, 1)).look
    verdict = look(0, {0: WAITS, 1: COMPUTES}, [1])
    assert verdict is not None and not verdict.is_to_end
    assert verdict.text == "rank 1 (box, process 100) has ended in training without a word"
    assert look(1, {0: WAITS, 1: replace(COMPUTES, has_left=True)}, [1]) is None


def test_a_rank_that_never_gave_a_sign() -> None:
    diagnosis = Diagnosis(Limits(), (0, 1))
    assert diagnosis.look(0, {0: WAITS}, []) is None
    assert diagnosis.look(59, {0: WAITS}, []) is None
    verdict = diagnosis.look(60, {0: replace(WAITS, number=2)}, [])
    assert verdict is not None and verdict.text == "rank 1 has given no sign since the start"


@dataclass
class Trainer:
    """The world of a trainer beside a rollouter, and a board with what the latter posts."""

    page: RestartPage
    notes: dict[str, bytes] = field(default_factory=dict)
    host, rank, size, run_size, numbers, meeting = "box", 0, 2, 2, (0, 1), None
    pulse = Pulse()

    def watch_board(self, seconds: float) -> Any:
        return self

    def post(self, name: str, note: bytes) -> None:
        self.notes[name] = note

    def read(self, name: str) -> bytes | None:
        return self.notes.get(name)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    page = RestartPage.made(1)
    page.write("ready", 1)
    yield Trainer(page)
    page.close()


ELSEWHERE = replace(COMPUTES, host="other", machine="other")


def named(trainer: Trainer, *signs: tuple[Sign, int]) -> list[Any]:
    """What the launcher is told of after each of these signs and so many seconds."""
    box = BlackBox.made()
    watch, now, found = Watch(cast("Processes", trainer), box), 0, list[Any]()
    for sign, seconds in signs:
        for _ in range(seconds):
            watch._post()
            trainer.post("sign 1", json.dumps(asdict(sign)).encode())
            now += 1
            watch._signs |= watch._read()
            assert watch._diagnose(now) is None, "the trainers go on"
        found.append(box.read().get("silent"))
    box.close()
    return found


def test_a_silent_rollouter_on_another_host_is_named_to_the_launcher(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named(trainer, (ELSEWHERE, 60), (ELSEWHERE, 100)) == [None, [1, 0]]
    assert capsys.readouterr().err.count("isobit: rank 1 (other, process 100)") == 1


def test_one_that_starts_again_is_not_found_silent_by_the_sign_of_the_last(
    trainer: Trainer,
) -> None:
    """However long it takes to load the model, and whatever number its process has."""
    trainer.page.write("starts", 1)
    again = replace(ELSEWHERE, start=1)
    signs = (ELSEWHERE, 500), (again, 60), (again, 10)
    assert named(trainer, *signs) == [None, None, [1, 1]]


def test_a_silent_one_on_this_host_is_killed_here(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(process))
    monkeypatch.setattr("isobit.parallel.watch._runs", lambda process: True)
    assert named(trainer, (replace(COMPUTES, machine=_machine()), 200)) == [None]
    assert killed == [COMPUTES.process]
