"""The ranks of a run in two parts, trainers and rollouters, and the group in which they meet.

    each part     a world of its own, which lives as long as its ranks
    the whole     all ranks in a further group (``isobit.parallel.processes.Meeting``), which is
                  broken off where rollouters are lost, and made anew with those that come back

Under our launcher rollouters that are killed start again (``isobit.parallel.restart_page``); under
others the whole is the world that the run began with, and a lost connection ends all ranks.

    a rollouter is killed     the launcher kills the other rollouters, counts a start, starts all
    the trainers              meet an error, at the latest where they meet rollouters next; they
                              agree on it, break the whole off, and wait for the newest start
    the new rollouters        load the model, say on the board that they are ready, and wait
    rank 0                    says on the board that the trainers come; all make the next whole

What the trainers do together with rollouters counts as done where it was done on all trainers.  A
rank that waits in the whole for another trainer is woken, since that one breaks the whole off; so
does the watch of every trainer, once the launcher has counted a start.
"""

import time
from collections.abc import Callable

from isobit.parallel.processes import Meeting, Processes, Single
from isobit.parallel.restart_page import Entry
from isobit.parallel.world import Board, World, broadcast, run_and_gather
from isobit.util.errors import PeerError

_LOOK_S = 0.05
"""Seconds between two looks at the board."""
_BACK_S = 1800.0
"""Seconds in which rollouters that start again load the model."""


def has_come_back(world: World) -> bool:
    """Whether this rank is a rollouter that was started again; ``world`` is that of all such."""
    return isinstance(world, Processes) and world.page is not None and world.page.start > 0


class Parts:
    """Both parts, seen from a rank of either."""

    def __init__(self, world: World, rollouters: int) -> None:
        """All ranks of the ``world`` make them together; the last ``rollouters`` are the second
        part.  Of ranks that have come back the world is their part already.
        """
        self._root = world if isinstance(world, Processes) and world.page is not None else None
        self._meeting: Meeting | None = None
        self._last = 0
        """The start of the last meeting."""
        self.has_come_back = has_come_back(world)
        if self._root is not None and self.has_come_back:
            self.trainers, self.is_rollouter = world.numbers[0], True
            self.mine = world if world.size > 1 else Single(self._root)
            self.board: Board = self._root.board_of_run()
            """The board of all ranks, also of those that come back."""
            return
        self.trainers = world.size - rollouters
        self.is_rollouter = world.rank >= self.trainers
        self.mine = world.split([0, self.trainers, world.size])
        self.board = world.board
        self._whole = world
        if self._root is not None:
            self._meet(0)
            self.mine.barrier("the other trainers")
            self._tell("ready", 1)

    @property
    def whole(self) -> World:
        """All ranks.  Raises PeerError where they have not met."""
        found = self._meeting if self._root is not None else self._whole
        if found is None:
            raise PeerError(None, "the rollouters are gone")
        return found

    @property
    def can_replace(self) -> bool:
        """Whether rollouters that are killed come back."""
        return self._root is not None

    def reached(self, act: Callable[[], object]) -> bool:
        """Trainers: whether all of them have done what they do together with rollouters.  Where
        some have not, since rollouters were lost, the whole is broken off.  Raises what ``act``
        raises otherwise; where no rollouters come back, a loss too.
        """
        if self._root is None:
            act()
            return True

        def attempt() -> bool:
            try:
                act()
            except PeerError as error:
                if error.rank is not None:
                    raise  # all have agreed on it
                self._break_off()
            return self._meeting is not None and not self._meeting.is_broken

        # a signal or a fault of this rank alone is raised on all trainers
        is_done = all(run_and_gather(self.mine, attempt))
        if not is_done:
            self._break_off()
        return is_done

    def next_whole(self) -> None:
        """Trainers: wait for rollouters that start again, and meet them.  Raises PeerError, on all
        of them, where none will come.
        """
        while True:
            start = broadcast(self.mine, self._ready_start)
            if self.reached(lambda start=start: self._meet(start)):
                return

    def come(self, check: Callable[[], None]) -> bool:
        """Rollouters: where they have come back, say so, and meet the trainers; False where the
        run is done, or ends.  Raises what ``check`` raises while they wait.
        """
        root = self._root
        if not self.has_come_back or root is None or root.page is None:
            return True
        start = root.page.start
        self.board.add(_ready(start), 1)
        with root.pulse.waiting("the trainers"):
            while self.board.read(_comes(start)) is None:
                if root.page.read("done") or root.page.read("over"):
                    return False
                check()
                time.sleep(_LOOK_S)
        self._meet(start)
        return True

    def note_answer(self) -> None:
        """Trainers: the rollouters have done what they were asked for."""
        if self._meeting is not None:
            self._tell("answered", self._meeting.start + 1)

    def finish(self, act: Callable[[], object]) -> None:
        """Trainers: the run is done, and ``act`` tells the rollouters, as far as they live."""
        self._tell("done", 1)
        if not self.reached(act) and self._root is not None:
            self._root.is_whole = False

    def _tell(self, name: Entry, number: int) -> None:
        """The first trainer writes on the launcher's page."""
        if self._root is not None and self._root.page is not None and self.mine.rank == 0:
            self._root.page.write(name, number)

    def _meet(self, start: int) -> None:
        assert self._root is not None
        self._last = start
        self._meeting = self._root.meet(start)

    def _break_off(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def _ready_start(self) -> int:
        """Rank 0: the newest start, once all its rollouters have loaded the model."""
        root = self._root
        assert root is not None
        assert root.page is not None
        page, start, until = root.page, self._last, time.monotonic() + _BACK_S
        while True:
            if page.read("over"):
                raise PeerError(self.trainers, "rollouters have died, and do not come back")
            if time.monotonic() >= until:
                raise PeerError(self.trainers, f"no rollouters are back after {_BACK_S:.0f} s")
            if page.read("starts") > start:
                start, until = page.read("starts"), time.monotonic() + _BACK_S
            if start > self._last and self.board.add(_ready(start), 0) == page.rollouters:
                self.board.post(_comes(start), b"")
                return start
            root.pulse.beat()
            time.sleep(_LOOK_S)


def _ready(start: int) -> str:
    return f"rollouters of start {start}"


def _comes(start: int) -> str:
    return f"trainers come to start {start}"
