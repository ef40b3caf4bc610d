"""A disk that is full while a run goes on: what is to be written is tried again until there is room
or the patience of ``checkpoint.wait_for_space_s`` ends.

What was learnt since the last checkpoint is in memory alone then, and somebody can still free some
space.  A signal ends the waiting within a second.  All ranks wait together, by the same count of
pauses rather than by their clocks, so that none gives up before another.
"""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TypeVar

from isobit.errors import NoSpaceError
from isobit.files import disk_errors
from isobit.parallel.agreement import together
from isobit.parallel.world import World
from isobit.parallel.writing import write_by_first

T = TypeVar("T")
FIRST_S, LONGEST_S = 2.0, 60.0
"""Of the pauses between two attempts, each twice as long as the one before: a quota is only found
by writing.
"""
LOOK_S = 0.5
"""Between two looks at signals in a pause."""
SAID_EVERY_S = 120.0


class Room:
    """Of a run in ``root``, for every write that is its own."""

    def __init__(
        self,
        world: World,
        root: Path,
        seconds: float,
        say: Callable[[str], None],
        look: Callable[[], None],
    ) -> None:
        """``look`` raises Interrupted where a signal to stop has come to this rank."""
        self._world, self._root, self._say, self._look = world, root, say, look
        self._seconds = seconds

    def follow(self, root: Path) -> None:
        """The run's directory is there now."""
        self._root = root

    def give_up(self) -> None:
        """The run ends: what does not fit from now on is an error at once."""
        self._seconds = 0

    def write(self, attempt: Callable[[], T]) -> T:
        """``attempt``, by all ranks together, again and again where it raises NoSpaceError on all;
        raises it in the end, and Interrupted on all where a signal comes meanwhile.
        """
        waited, said_at, pause = 0.0, -SAID_EVERY_S, FIRST_S
        while True:
            try:
                made = attempt()
            except NoSpaceError as error:
                left = self._seconds - waited
                if left <= 0:
                    self.give_up()
                    raise
                if waited - said_at >= SAID_EVERY_S:
                    said_at = waited
                    self._say(_describe(error, left))
                pause = min(pause, left)
            else:
                if waited:
                    self._say(f"there is room again, after {waited:.0f} s: going on")
                return made
            self._pause(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_S)

    def by_first(self, attempt: Callable[[], None]) -> None:
        """``write`` of what rank 0 does alone; its error, of whatever file, is that of all."""

        def first() -> None:
            with disk_errors(self._root, "the files of the run"):
                attempt()

        self.write(lambda: write_by_first(self._world, first))

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            together(self._world, self._look)
            sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S


def _describe(error: NoSpaceError, left: float) -> str:
    return (
        f"note: {error}; trying again for {left:.0f} s (checkpoint.wait_for_space_s), in which "
        "nothing is lost"
    )
