"""A disk that is full while a run goes on: what is to be written is tried again until there is room
or the patience of ``checkpoint.wait_for_space_s`` ends.

What was learnt since the last checkpoint is in memory alone then, and somebody can still free some
space.  A signal ends the waiting within a second.  All ranks wait together, by the same count of
pauses rather than by their clocks, so that none gives up before another.

Whether all hosts see the same output directory, found out before a run begins: rank 0 leaves a
file there, and every rank looks for it.

A checkpoint is written by all ranks into the same files; on disks of their own each host would keep
a part that nobody can use.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

from isobit.parallel.world import World, broadcast, raised_on_all, run_on_all, write_on_first
from isobit.util.errors import ConfigError, NoSpaceError
from isobit.util.files import disk_errors

T = TypeVar("T")
FIRST_S, LONGEST_S = 2.0, 60.0
"""Of the pauses between two attempts, each twice as long as the one before: a quota is only found
by writing.
"""
LOOK_S = 0.5
"""Between two looks at signals in a pause."""
SAID_EVERY_S = 120.0


class WaitingWriter:
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

    def write_on_first(self, attempt: Callable[[], None]) -> None:
        """``write`` of what rank 0 does alone; its error, of whatever file, is that of all."""

        def first() -> None:
            with disk_errors(self._root, "the files of the run"):
                attempt()

        self.write(lambda: write_on_first(self._world, first))

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            run_on_all(self._world, self._look)
            sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S


def _describe(error: NoSpaceError, left: float) -> str:
    return (
        f"note: {error}; trying again for {left:.0f} s (checkpoint.wait_for_space_s), in which "
        "nothing is lost"
    )


PATIENCE_S = 5.0
"""A network file system may show a new file that much later."""


def check_shared(world: World, root: Path) -> None:
    """Raise ConfigError on all ranks, naming those that do not see what rank 0 writes where the
    run's directory ``root`` is or will be.
    """
    if world.size == 1:
        return
    above = (root.absolute(), *root.absolute().parents)

    def leave() -> tuple[int, str]:
        level = next(level for level, place in enumerate(above) if place.is_dir())
        name = f".isobit-{secrets.token_hex(8)}"
        with disk_errors(above[level], "a file for the other ranks"):
            (above[level] / name).touch()
        return level, name

    level, name = broadcast(world, leave)
    place = above[level] if level < len(above) else above[-1]
    mine = f"rank {world.rank} on {world.host}: {place}"
    found = world.all_gather([mine, _appears(place / name)])
    if world.rank == 0:
        with suppress(OSError):
            (place / name).unlink()
    blind = [where for where, sees in found if not sees]
    if blind:
        raise raised_on_all(
            ConfigError(
                f"output is {str(root)!r}, and what rank 0 writes there is not seen by\n"
                + "".join(f"  {where}\n" for where in blind)
                + "put it on a file system that all hosts share, under the same path (--output "
                "PATH), or write no checkpoints (checkpoint.keep_last = 0)"
            )
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes soon."""
    last = monotonic() + PATIENCE_S
    while True:
        with suppress(OSError):  # reading the folder is what makes a network file system look again
            if path.name in (other.name for other in path.parent.iterdir()):
                return True
        if monotonic() >= last:
            return False
        sleep(0.2)
