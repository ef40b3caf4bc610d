"""The wall seconds of a step's parts."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

Timing = Callable[[str], AbstractContextManager[None]]
"""Called with the name of a part of the work; a ``Clock`` is one."""


def untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class Clock:
    """Adds up the seconds spent under each name; calls ``on_enter`` when one begins."""

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._on_enter = on_enter

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under ``name``."""
        started_at = perf_counter()
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - started_at

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
