"""How much of a run's time goes into its checkpoints: a file system that is slow, or has become so,
shows in nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

SLOW_S, SLOW_SHARE = 30.0, 0.1
"""A save that takes longer than this, and more than this share of the time from the one before to
its own end, is told of.
"""


class SaveTime:
    """Of the checkpoints of one process, written every so many steps."""

    def __init__(self, every: int, now: Callable[[], float] = monotonic) -> None:
        """``now`` gives seconds, and never runs back."""
        self._every, self._now = every, now
        self._seconds, self._since, self._said = 0.0, 0.0, 0.0
        self._ended_at = now()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes a checkpoint; one that fails counts for nothing."""
        began_at = self._now()
        yield
        ended_at = self._now()
        self._seconds, self._since = ended_at - began_at, ended_at - self._ended_at
        self._ended_at = ended_at

    def notes(self, step: int, num_bytes: int, folder: Path) -> list[str]:
        """What a user should know of the last one, of ``num_bytes``; again only where it has taken
        twice as long as what was said.
        """
        share = self._seconds / self._since if self._since else 0.0
        if self._seconds <= max(SLOW_S, 2 * self._said) or share <= SLOW_SHARE:
            return []
        self._said = self._seconds
        return [
            f"the checkpoint of step {step} took {self._seconds:.0f} s, {share:.0%} of the time "
            f"since the one before, at {num_bytes / self._seconds / 1e6:,.1f} MB/s; write fewer "
            f"(checkpoint.every = {self._every}), or use a disk that is faster than that under "
            f"{folder} (--output PATH)"
        ]
