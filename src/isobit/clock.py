"""Wall seconds of the parts of a step, by a monotonic clock."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Adds up the seconds spent under each name."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under ``name``."""
        started_at = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - started_at

    def take(self) -> dict[str, float]:
        """The seconds by name since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
