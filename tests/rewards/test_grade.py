"""What graders met, counted.

A deadline within a process.
"""

import json
import signal
import threading
import time
from typing import Any

import pytest

from isobit.rewards.counts import LONGEST_KIND, MOST, MOST_KINDS, OTHER_KINDS, bounded, count, take
from isobit.rewards.deadline import DeadlineError, deadline
from isobit.rewards.grade import Failure, failure_of


def test_counts_are_taken_once() -> None:
    take()
    count("code: time limit")
    count("code: time limit")
    count("code: no block")
    assert take() == {"code: time limit": 2, "code: no block": 1}
    assert take() == {}


def test_the_rarest_of_many_kinds_are_added_up() -> None:
    counts = {f"kind {n}": n for n in range(1, 101)} | {OTHER_KINDS: 1000}
    found = bounded(counts)
    assert len(found) == MOST_KINDS and sum(found.values()) == sum(counts.values())
    assert next(iter(found)) == "kind 100" and list(found)[-1] == OTHER_KINDS
    assert bounded(found) == found


@pytest.mark.parametrize("character", ["x", "\\", '"', "\n", "\x1b", "\N{PILE OF POO}", "\ud800"])
def test_the_largest_counts_fit_into_a_line(character: str) -> None:
    kinds = {f"{n:02}" + character * 10**4: 10**30 for n in range(100)}
    found = bounded(kinds)
    assert all(len(kind) <= LONGEST_KIND and number <= MOST for kind, number in found.items())
    assert len(json.dumps(found)) < 2600


@pytest.mark.parametrize("content", [{"a": "1"}, {"a": 1.5}, {"a": True}, {"a": -1}, {3: 1}])
def test_what_is_no_count_is_left_out(content: dict[Any, Any]) -> None:
    assert bounded({"b": 2} | content) == {"b": 2}


def test_what_takes_too_long_is_interrupted_whatever_it_survives() -> None:
    def survives() -> None:
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with pytest.raises(DeadlineError), deadline(0.05):
        survives()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_python_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.rewards.deadline.AGAIN_S", 0.3)

    class Rubbish:
        def __del__(self) -> None:
            time.sleep(0.1)  # the alarm strikes here, where no exception gets out

    def leaves_rubbish() -> None:
        Rubbish()
        time.sleep(5)

    with pytest.raises(DeadlineError), deadline(0.05):
        leaves_rubbish()


def test_what_is_in_time_is_left_alone() -> None:
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's own alarm
    before = signal.getsignal(signal.SIGALRM)
    with deadline(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
    signal.setitimer(signal.ITIMER_REAL, left)


def test_an_alarm_that_was_set_before_goes_on() -> None:
    before, _ = signal.setitimer(signal.ITIMER_REAL, 600)  # pytest's own alarm
    try:
        with deadline(60):
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)


def test_other_threads_have_none() -> None:
    done: list[int] = []

    def run() -> None:
        with deadline(0.001):
            time.sleep(0.01)
            done.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [1]


def test_a_failure_has_nothing_that_drives_a_terminal() -> None:
    found = failure_of(type("A\x1b[2J", (Exception,), {})("b\x1b[2J\r\x9b\u202e"))
    assert found.kind == "'A\\x1b[2J'"
    assert found.message == "A\\x1b[2J: b\\x1b[2J\\r\\x9b\\u202e"
    assert Failure(found.kind, found.message) == found
