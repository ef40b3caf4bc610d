"""Writes that find no room are tried again, by all ranks alike, as long as the patience lasts."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from isobit.parallel.world import ALONE, World, is_raised_on_all, write_on_all
from isobit.store import waiting_writer as module
from isobit.store.waiting_writer import WaitingWriter
from isobit.util.errors import Interrupted, NoSpaceError, StorageError
from tests.worlds import in_world


class Patience:
    """A clock that runs by the pauses alone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.longest = 0.0
        patch.setattr(module, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


def full_until(number: int, error: type[Exception] = NoSpaceError) -> Callable[[], int]:
    """An attempt that succeeds at that time; -> how often it was tried."""
    tried = 0

    def attempt() -> int:
        nonlocal tried
        tried += 1
        if tried < number:
            raise error("the file needs 10 bytes, but 3 are free")
        return tried

    return attempt


def test_it_is_tried_again_and_said_now_and_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patience, said = Patience(monkeypatch), list[str]()
    writer = WaitingWriter(ALONE, tmp_path, 600, said.append, lambda: None)
    assert writer.write(full_until(1)) == 1 and said == []
    assert writer.write(full_until(9)) == 9
    pauses = [2, 4, 8, 16, 32, 60, 60, 60]
    assert patience.seconds == sum(pauses) and patience.longest <= 0.5
    assert [line.partition(" (")[0] for line in said] == [
        "note: the file needs 10 bytes, but 3 are free; trying again for 600 s",
        "note: the file needs 10 bytes, but 3 are free; trying again for 478 s",
        "there is room again, after 242 s: going on",
    ]


def test_it_ends_after_the_time_and_what_follows_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patience = Patience(monkeypatch)
    writer = WaitingWriter(ALONE, tmp_path, 45, lambda _: None, lambda: None)
    for _ in range(2):
        with pytest.raises(NoSpaceError, match="needs 10 bytes"):
            writer.write(full_until(99))
    assert patience.seconds == 45, "the last attempt is made when the time is over"
    with pytest.raises(NoSpaceError):
        WaitingWriter(ALONE, tmp_path, 0, lambda _: None, lambda: None).write(full_until(2))
    for error in (StorageError, ValueError):
        with pytest.raises(error):
            WaitingWriter(ALONE, tmp_path, 45, lambda _: None, lambda: None).write(
                full_until(2, error)
            )
    assert patience.seconds == 45


def test_a_signal_ends_it_within_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patience = Patience(monkeypatch)

    def look() -> None:
        if patience.seconds > 20:
            raise Interrupted("SIGTERM", 15)

    with pytest.raises(Interrupted):
        WaitingWriter(ALONE, tmp_path, 600, lambda _: None, look).write(full_until(99))
    assert 20 < patience.seconds <= 21


def ranks(world: World, folder: str) -> dict[str, Any]:
    """One rank lacks space for a while, for ever, until a signal; rank 0 cannot write a file."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patience = Patience(patch)

        def attempt(until: int) -> Callable[[], Any]:
            tried = full_until(until)
            fits = count(1)
            mine = tried if world.rank == world.size - 1 else lambda: next(fits)
            return lambda: write_on_all(world, mine)

        def look() -> None:
            if world.rank == 1 and patience.seconds > 40:
                raise Interrupted("SIGTERM", 15)

        def writer(seconds: float) -> WaitingWriter:
            return WaitingWriter(world, Path(folder), seconds, lambda _: None, look)

        def unwritable() -> None:
            assert world.rank == 0
            raise OSError(5, "Input/output error")

        cases: dict[str, Callable[[], Any]] = {
            "for a while": lambda: writer(600).write(attempt(3)),
            "for ever": lambda: writer(20).write(attempt(99)),
            "a signal": lambda: writer(600).write(attempt(99)),
            "a broken disk": lambda: writer(600).write_on_first(unwritable),
        }
        for name, case in cases.items():
            try:
                found[name] = case()
            except (StorageError, Interrupted) as error:
                found[name] = [type(error).__name__, str(error), is_raised_on_all(error)]
            found[f"{name}, seconds"] = patience.seconds
    return found


def test_ranks_wait_and_end_together(tmp_path: Path) -> None:
    first, second = in_world(2, f"{__name__}:ranks", str(tmp_path))
    assert first == second, "all ranks know the same"
    assert first["for a while"] == [3, 3], "both have tried three times"
    assert first["for a while, seconds"] == 6
    kind, text, all_know = first["for ever"]
    assert kind == "NoSpaceError" and text.startswith("rank 1 on ") and all_know
    assert first["for ever, seconds"] == 26
    assert first["a signal"] == ["Interrupted", "stopped by SIGTERM", True]
    kind, text, all_know = first["a broken disk"]
    assert kind == "StorageError" and "Input/output error" in text and all_know
