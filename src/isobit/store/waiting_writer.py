"""Waiting while the disk is full.

When the disk fills up during the run, each write is retried until there is space or
``checkpoint.wait_for_space_s`` seconds have passed, since all that was learned after the last
checkpoint is in memory alone.  A signal ends the wait within a second.  All ranks count the same
pauses instead of reading their clocks, so that none gives up before another.
"""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TypeVar

from isobit.parallel.world import World, run_on_all, write_on_first
from isobit.util.disk_space import disk_errors
from isobit.util.errors import NoSpaceError

T = TypeVar("T")
FIRST_S, LONGEST_S = 2.0, 60.0
"""Pauses between attempts, each twice the one before: only writing notices a quota."""
LOOK_S = 0.5  # between two looks for signals in a pause
SAID_EVERY_S = 120.0


class WaitingWriter:
    """Writes the files of a run in ``root``, and waits where the disk is full."""

    def __init__(
        self,
        world: World,
        root: Path,
        seconds: float,
        say: Callable[[str], None],
        look: Callable[[], None],
    ) -> None:
        """``look`` raises Interrupted where this rank has received a signal to stop."""
        self._world, self._root, self._say, self._look = world, root, say, look
        self._seconds = seconds

    def follow(self, root: Path) -> None:
        """Continue in the run's directory ``root``."""
        self._root = root

    def give_up(self) -> None:
        """Wait no more: a full disk is an error at once."""
        self._seconds = 0

    def write(self, attempt: Callable[[], T]) -> T:
        """``attempt``, on all ranks together, repeated where it raises NoSpaceError on all, which
        is raised in the end; raises Interrupted on all after a signal.
        """
        waited, said_at, pause = 0.0, -SAID_EVERY_S, FIRST_S
        while True:
            try:
                result = attempt()
            except NoSpaceError as error:
                left = self._seconds - waited
                if left <= 0:
                    self.give_up()
                    raise
                if waited - said_at >= SAID_EVERY_S:
                    said_at = waited
                    self._say(
                        f"note: {error}; trying again for {left:.0f} s "
                        "(checkpoint.wait_for_space_s), in which nothing is lost"
                    )
                pause = min(pause, left)
            else:
                if waited:
                    self._say(f"there is room again, after {waited:.0f} s: going on")
                return result
            self._pause(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_S)

    def write_on_first(self, attempt: Callable[[], None]) -> None:
        """``write`` of what rank 0 does alone; its error is raised on all."""

        def first() -> None:
            with disk_errors(self._root, "the files of the run"):
                attempt()

        self.write(lambda: write_on_first(self._world, first))

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            run_on_all(self._world, self._look)
            sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S
