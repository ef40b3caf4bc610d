"""Rollouters that die and are started again while the trainers of the run go on.

All rollouters start again together, since those that live may wait for the one that is dead.  They
are told by their environment which start is theirs (``isobit.parallel.restart_page``), load the
model, and wait until the trainers come to meet them (``isobit.parallel.parts``).
"""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from isobit.launch.ranks import KILL_S, Rank, Ranks
from isobit.parallel.restart_page import RestartPage
from isobit.util.errors import PeerError
from isobit.util.terminal import say

AnyRank = TypeVar("AnyRank", bound=Rank)
DEATHS = 3
"""Deaths in a row, with no answer between them, that end the run."""
_State = Literal["serving", "to start", "coming back", "given up", "lost"]
"""The rollouters were ended to be started again; were started, but have not answered yet; are not
needed any more, since the run ends; or are the reason why it ends.
"""


def ranks_with(
    page: RestartPage | None,
    ranks: list[AnyRank],
    hear: Callable[[], None],
    start: Callable[[int, int], AnyRank],
) -> Ranks:
    """The ranks of a run; with a ``page`` those of its rollouters that are killed start again."""
    if page is None:
        return Ranks(ranks, hear)
    return Ranks(ranks, hear, RollouterRestarts(page, ranks, start).look)


class RollouterRestarts:
    """Looks at the rollouters among the ranks of a run, which are the last in a list, and replaces
    them there.  None is waited for: one that a driver holds does not keep signals from the others.
    """

    def __init__(
        self, page: RestartPage, ranks: list[AnyRank], start: Callable[[int, int], AnyRank]
    ) -> None:
        """``start(number, of)`` starts a rank again, of so many starts."""
        self._page, self._ranks, self._start = page, ranks, start
        self._first = len(ranks) - page.rollouters
        self._deaths = 0
        self._counted_from = 0
        """Starts that had answered when a death was last counted."""
        self._state: _State = "serving"
        self._until: float | None = None
        """When rollouters that have lost another are believed to be the first that ended; once the
        run is done, when they are ended.
        """
        self._silent: Sequence[int] | None = None
        """The last that the trainers have named (``isobit.parallel.watch``)."""

    def look(self, is_ending: bool) -> None:
        """Start the rollouters again where one was killed, unless the run ``is_ending``.  Once it
        is done, rollouters have nothing to lose: how they end is no failure.
        """
        if self._page.read("done"):
            self._let_end()
            return
        self._kill_silent()
        ends = is_ending or any(rank.exit_code is not None for rank in self._trainers)
        if self._state == "coming back" and self._page.read("answered") > self._page.read("starts"):
            self._state = "serving"
            for rank in self._rollouters:
                rank.hears_signals = True
        if self._state == "given up" or (ends and self._state in ("to start", "coming back")):
            self._give_up()
        elif self._state in ("serving", "coming back"):
            self._look_for_the_dead(ends)
        if self._state == "to start" and not any(rank.is_running() for rank in self._rollouters):
            self._start_all()

    @property
    def _trainers(self) -> Sequence[Rank]:
        return self._ranks[: self._first]

    @property
    def _rollouters(self) -> Sequence[Rank]:
        return self._ranks[self._first :]

    def _kill_silent(self) -> None:
        """Kill what rank 0 has found silent where it cannot reach it, on another host."""
        named: Sequence[int] | None = self._ranks[0].notes.get("silent")
        if named is None or named == self._silent:
            return
        self._silent = named
        number, start = named
        if start == self._page.read("starts"):
            self._ranks[number].send(signal.SIGKILL)

    def _look_for_the_dead(self, ends: bool) -> None:
        if all(rank.exit_code is None for rank in self._rollouters):
            return
        # one that has lost another may be seen before that one
        dead = [rank for rank in self._rollouters if not rank.is_running()]
        killed = [rank for rank in dead if rank.was_killed]
        if len(dead) < len(self._rollouters) and not killed and all(map(_follows, dead)):
            now = time.monotonic()
            self._until = self._until or now + KILL_S
            if now < self._until:
                for rank in dead:
                    rank.may_return = True
                return
        self._until = None
        others = [rank for rank in dead if rank not in killed and not _follows(rank)]
        can_return = self._page.read("ready") and not self._page.read("over") and not ends
        if not can_return or not killed or others or not self._is_counted(killed[0]):
            self._end(others)
            return
        of = self._page.read("starts") + 1
        say(
            f"{killed[0].describe()}\nisobit: the rollouters are started again, {_times(of)}; the "
            "trainers go on"
        )
        self._page.write("starts", of)
        self._state = "to start"
        for rank in self._rollouters:
            rank.may_return = True
            rank.end(signal.SIGKILL)

    def _end(self, others: Sequence[Rank]) -> None:
        """The rollouters do not come back, since ``others`` have ended by themselves, say."""
        for rank in others:
            if rank.exit_code == 0 and any(one.exit_code is None for one in self._trainers):
                say(f"error: rank {rank.number} has ended before the trainers were done")
        self._state = "lost"
        self._page.write("over", 1)
        for rank in self._rollouters:
            rank.may_return = False

    def _is_counted(self, rank: Rank) -> bool:
        """Count a death; -> whether the rollouters may start again after it."""
        answered = self._page.read("answered")
        self._deaths = 1 if answered > self._counted_from else self._deaths + 1
        self._counted_from = answered
        if self._deaths < DEATHS:
            return True
        say(
            f"isobit: rank {rank.number} is not started again, since its part of the run has died "
            f"{self._deaths} times without an answer between"
        )
        return False

    def _start_all(self) -> None:
        """Start the rollouters again, of which none runs any more."""
        self._state = "coming back"
        for number in range(self._first, len(self._ranks)):
            started = self._start(number, self._page.read("starts"))
            started.hears_signals = False
            self._ranks[number].close()
            self._ranks[number] = started

    def _give_up(self) -> None:
        """The run ends while rollouters come back, who have nothing to lose."""
        self._state = "given up"
        self._page.write("over", 1)
        for rank in self._rollouters:
            rank.may_return = True
            rank.end(signal.SIGKILL)
            if rank.exit_code is not None:
                rank.excuse()

    def _let_end(self) -> None:
        """Excuse rollouters; once the trainers have ended well, end those that do not end."""
        if any(rank.exit_code for rank in self._trainers):
            return
        for rank in self._rollouters:
            if rank.exit_code is not None:
                rank.excuse()
        if any(rank.exit_code is None for rank in self._trainers):
            return
        now = time.monotonic()
        self._until = self._until or now + KILL_S
        if now >= self._until:
            for rank in self._rollouters:
                rank.end(signal.SIGKILL)


def _follows(rank: Rank) -> bool:
    """Whether it has ended since another had."""
    return rank.exit_code == PeerError.exit_code


def _times(count: int) -> str:
    return "for the first time" if count == 1 else f"{count} times by now"
