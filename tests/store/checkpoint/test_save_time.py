"""A checkpoint that takes much of a run's time is told of, whatever its size."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from isobit.config.run import RunConfig
from isobit.errors import StorageError
from isobit.run.rl.loop import train
from isobit.store.checkpoint import format as checkpoint_format
from isobit.store.checkpoint import save_time
from isobit.store.checkpoint.save_time import SaveTime


class Seconds:
    """A monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved(times: list[tuple[float, float]]) -> list[list[str]]:
    """The notes of saves, each after so many seconds of steps and taking so many."""
    now, found = Seconds(), list[list[str]]()
    time = SaveTime(10, now)
    for steps, seconds in times:
        now.now += steps
        with time.writing():
            now.now += seconds
        found.append(time.notes(10 * (len(found) + 1), 2_000_000_000, Path("runs/mine")))
    return found


def test_a_save_that_takes_long_and_much_of_the_time_is_told_of_with_its_figures() -> None:
    assert saved([(105, 45)]) == [
        [
            "the checkpoint of step 10 took 45 s, 30% of the time since the one before, at 44.4 "
            "MB/s; write fewer (checkpoint.every = 10), or use a disk that is faster than that "
            "under runs/mine (--output PATH)"
        ]
    ]


def test_short_ones_rare_ones_and_the_same_again_are_not() -> None:
    assert saved([(1, 29), (3600, 300), (0, 0)]) == [[], [], []]
    found = saved([(60, 40), (60, 41), (60, 79), (60, 81)])
    assert [len(notes) for notes in found] == [1, 0, 0, 1]


def test_one_that_fails_counts_for_nothing() -> None:
    now = Seconds()
    time = SaveTime(10, now)
    with suppress(StorageError), time.writing():
        now.now += 100
        raise StorageError("no space")
    with time.writing():
        now.now += 1
    assert time.notes(10, 1, Path()) == []


def test_a_run_on_a_slow_disk_says_it_once(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file system that takes 25 seconds for a file, in a run whose steps take none; the wall
    clock runs back meanwhile, which nobody asks.
    """
    now, sync = Seconds(), checkpoint_format.sync

    def slow(path: Path) -> None:
        sync(path)
        now.now += 25 if path.name == "masters.safetensors" else 0
        now.now += 20 if path.name == "optimiser.safetensors" else 0

    monkeypatch.setattr(checkpoint_format, "sync", slow)
    monkeypatch.setattr(save_time.SaveTime.__init__, "__defaults__", (now,))
    wall = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("time.time", lambda: float(next(wall)))
    train(make_config(training={"steps": 3, "without_signal": "take"}, checkpoint={"every": 1}))
    printed = capsys.readouterr().out
    assert printed.count("of the time since the one before") == 1
    assert "note: the checkpoint of step 1 took 45 s, 100% of the time" in printed
