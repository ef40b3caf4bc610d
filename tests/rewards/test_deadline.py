"""A deadline within a process."""

import signal
import sys
import threading
import time

import pytest

from isobit.rewards.deadline import DeadlineError, deadline


def test_what_takes_too_long_is_interrupted_whatever_it_survives() -> None:
    def survives() -> None:
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with pytest.raises(DeadlineError), deadline(0.05):
        survives()


def test_an_alarm_that_python_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is instant: pytest's imports modules, which may take longer than the pause."""
    monkeypatch.setattr("isobit.rewards.deadline.AGAIN_S", 0.3)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Rubbish:
        def __del__(self) -> None:
            time.sleep(30)  # the alarm strikes here, where no exception gets out

    def leaves_rubbish() -> None:
        Rubbish()
        time.sleep(30)

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
