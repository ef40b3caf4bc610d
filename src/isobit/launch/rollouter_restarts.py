"""Rollouters that die and are started again while the trainers of the run go on.

All rollouters start again together, since those that live may wait for the one that is dead.  They
are told by their environment which start is theirs (``isobit.parallel.restart_page``), load the
model, and wait until the trainers come to meet them (``isobit.parallel.parts``).
"""

import signal
import time
from collections.abc import Callable
from typing import TypeVar

from isobit.launch.ranks import KILL_S, Rank
from isobit.parallel.restart_page import RestartPage
from isobit.util.errors import PeerError
from isobit.util.terminal import say

AnyRank = TypeVar("AnyRank", bound=Rank)
DEATHS = 3
"""Deaths in a row, with no answer between them, that end the run."""


class RollouterRestarts:
    """Looks at the rollouters among the ranks of a run, which are the last in a list, and replaces
    them there.
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
        self._end_at: float | None = None

    def look(self, is_ending: bool) -> None:
        """Start the rollouters again where one was killed, unless the run ``is_ending``.  Once it
        is done, rollouters have nothing to lose: how they end is no failure.
        """
        rollouters, trainers = self._ranks[self._first :], self._ranks[: self._first]
        if self._page.read("done"):
            self._let_end()
            return
        if all(rank.exit_code is None for rank in rollouters):
            return
        # one that has lost another may be seen before that one
        dead = [rank for rank in rollouters if not rank.is_running() and rank.exit_code]
        if not dead:
            return
        killed = [rank for rank in dead if rank.was_killed]
        can_return = self._page.read("ready") and not self._page.read("over")
        others = [rank for rank in dead if rank not in killed and not _follows(rank)]
        if (
            is_ending
            or not can_return
            or not killed
            or others
            or any(rank.exit_code is not None for rank in trainers)
            or not self._is_counted(killed[0])
        ):
            self._page.write("over", 1)
            return
        self._start_again(killed[0])

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

    def _start_again(self, rank: Rank) -> None:
        of = self._page.read("starts") + 1
        say(
            f"{rank.describe()}\nisobit: the rollouters are started again, {_times(of)}; the "
            "trainers go on"
        )
        numbers = range(self._first, len(self._ranks))
        for number in numbers:
            self._ranks[number].close()
        self._page.write("starts", of)
        for number in numbers:
            started = self._start(number, of)
            started.hears_signals = False
            self._ranks[number] = started

    def _let_end(self) -> None:
        """Excuse rollouters; once the trainers have ended well, end those that do not end."""
        rollouters, trainers = self._ranks[self._first :], self._ranks[: self._first]
        if any(rank.exit_code for rank in trainers):
            return
        for rank in rollouters:
            if rank.exit_code is not None:
                rank.excuse()
        if any(rank.exit_code is None for rank in trainers):
            return
        now = time.monotonic()
        self._end_at = self._end_at or now + KILL_S
        if now >= self._end_at:
            for rank in rollouters:
                rank.end(signal.SIGKILL)


def _follows(rank: Rank) -> bool:
    """Whether it has ended since another had."""
    return rank.exit_code == PeerError.exit_code


def _times(count: int) -> str:
    return "for the first time" if count == 1 else f"{count} times by now"
