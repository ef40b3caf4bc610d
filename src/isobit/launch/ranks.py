"""The ranks of a run as their launcher watches and ends them.

When a rank ends with an error, the others are asked to end, and killed after a while: they may wait
in a collective for the one that is gone.  A rank is a process of this host (``launch/local.py``) or
of a Ray cluster (``launch/ray_launcher.py``).
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from isobit.parallel.launched import SAVES, STOPS
from isobit.util.errors import Interrupted, IsobitError, MismatchError, PeerError


class RankError(IsobitError):
    """A rank has failed, and all have ended with it; ``exit_code`` is that rank's.  It ``died``
    unless it knew of an error that a user can meet, or a signal had asked all to stop: started
    again, it may live.
    """

    def __init__(self, text: str, exit_code: int, died: bool = False) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.died = died


KILL_S = 10.0
"""Seconds between asking a rank to end and killing it."""
ORDERLY_S = 60.0
"""Seconds for the others to end by themselves, where a rank said why it ends: they may be writing.
"""


class Rank(ABC):
    """One process of a run."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.exit_code: int | None = None
        """Once it has ended; negative: a signal's number."""
        self.hears_signals = True
        """Whether signals to the launcher reach it: of one that was started again they do not,
        before it has answered, since it may not know yet what to do about them.
        """
        self.may_return = False
        """Whether its end is no failure yet, since it may be started again."""
        self._was_ended = False

    @property
    @abstractmethod
    def notes(self) -> Mapping[str, Any]:
        """Its black box (``isobit.parallel.black_box``)."""

    @property
    @abstractmethod
    def failed_at(self) -> float:
        """Seconds of this process's monotonic clock at which it noted why it ends, or was last seen
        running.
        """

    @property
    @abstractmethod
    def code(self) -> int:
        """Its exit code as a shell gives it."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether it still runs, as of now."""

    @abstractmethod
    def send(self, number: int) -> None:
        """A signal that it may answer as it likes."""

    @abstractmethod
    def describe(self) -> str:
        """How it ended."""

    @abstractmethod
    def close(self) -> None:
        """End it, if it still runs, and give everything back."""

    @property
    def has_said_why(self) -> bool:
        """Whether it ended in order: with an error that a user can meet, on a signal, or since it
        knew of another's end.
        """
        orderly = (*(128 + number for number in STOPS), PeerError.exit_code)
        return "error" in self.notes or self.exit_code in orderly

    @property
    def order(self) -> tuple[bool, float]:
        """Among those that failed, the least is the one that began: those that were ended, or
        stopped since another had failed, come last.
        """
        follows = self._was_ended or self.exit_code == PeerError.exit_code
        return follows, self.failed_at

    def end(self, number: int) -> None:
        """A signal after which its end is no failure of its own, if it still runs."""
        if self.exit_code is None:
            self._was_ended = True
            self.send(number)

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it that did not come from ``end``, and it noted no reason."""
        has_reason = "error" in self.notes or "fault" in self.notes
        return (self.exit_code or 0) < 0 and not self._was_ended and not has_reason

    def excuse(self) -> None:
        """Take its end for one in order: nothing was lost with it."""
        self.exit_code = 0

    def stopped_by(self, number: int) -> bool:
        """Whether that signal is what ended it."""
        return self._was_ended or self.exit_code in (128 + number, -number, PeerError.exit_code)


class Ranks:
    """All of them, from their start to the end of the last.  ``hear`` waits a moment for news of
    those that still run.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        hear: Callable[[], None],
        replace: Callable[[bool], None] = lambda is_ending: None,
    ) -> None:
        """``replace`` may start ranks again that have ended, in the same sequence; it is told
        whether the run ends by a signal or by another rank's failure.
        """
        self._ranks, self._hear, self._replace = ranks, hear, replace
        self._signal: signal.Signals | None = None
        self._again = 0
        """Ctrl-C, after a first signal."""
        self._kill_at: float | None = None

    def run(self, kill_s: float = KILL_S, orderly_s: float = ORDERLY_S) -> None:
        """Wait until all have ended.  Raises RankError with the one reason where one failed, and
        Interrupted where all stopped on a signal; nothing of them runs any more then.
        """
        try:
            with self._forwarding():
                self._watch(kill_s, orderly_s)
            self._check()
        finally:
            for rank in self._ranks:
                rank.close()

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """A block in which signals to this process reach the ranks.  Those that its caller has
        switched off (``nohup``) stay so.
        """
        before: dict[signal.Signals, Any] = {}
        for number in (*STOPS, SAVES):
            if signal.getsignal(number) is not signal.SIG_IGN:
                forward = self._hand_on if number == SAVES else self._forward
                before[number] = signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, kill_s: float, orderly_s: float) -> None:
        """Wait until no rank runs.  From the first failure on the others have ``orderly_s`` to end,
        or none where it did not say why it ended; then they are asked, and after ``kill_s`` killed.
        """
        asked = False
        ask_at: float | None = None
        while any(rank.is_running() for rank in self._ranks):
            self._hear()
            for rank in self._ranks:
                rank.is_running()
            self._replace(asked or self._signal is not None)
            running = [rank for rank in self._ranks if rank.exit_code is None]
            now = time.monotonic()
            failed = [rank for rank in self._ranks if rank.exit_code and not rank.may_return]
            if failed and ask_at is None:
                ask_at = now + (orderly_s if self._in_order(failed[0]) else 0)
            if ask_at is not None and now >= ask_at and not asked:
                asked = True
                for rank in running:
                    rank.end(signal.SIGTERM)
                self._kill_at = min(self._kill_at or now + kill_s, now + kill_s)
            if self._again and self._kill_at is None:
                self._kill_at = now + kill_s
            if self._kill_at is not None and now >= self._kill_at:
                for rank in running:
                    rank.end(signal.SIGKILL)
        self._replace(True)

    def _in_order(self, rank: Rank) -> bool:
        """Whether the others, who may still be writing, will end by themselves."""
        stopped = self._signal is not None and rank.stopped_by(self._signal)
        return stopped or rank.has_said_why

    def _check(self) -> None:
        """Raise for what went wrong, if anything did."""
        failed = [rank for rank in self._ranks if rank.exit_code]
        if not failed:
            return
        if self._signal is not None and all(rank.stopped_by(self._signal) for rank in failed):
            raise Interrupted(self._signal.name, self._signal)
        first = min(failed, key=lambda rank: rank.order)
        code = first.notes.get("code") or first.code
        died = self._died(first) and self._signal is None  # none goes on that was asked to stop
        raise RankError(self._reason(first, failed), code, died)

    def _verdicts(self) -> list[tuple[int | None, str]]:
        """What ranks found of others that are dead or silent: the other's number, and the text."""
        return [rank.notes["verdict"] for rank in self._ranks if "verdict" in rank.notes]

    def _died(self, first: Rank) -> bool:
        """Whether a rank was lost, rather than stopped for a reason that it knew."""
        codes = (IsobitError.exit_code, MismatchError.exit_code)
        knew = "error" in first.notes or first.exit_code in codes
        return first.exit_code == PeerError.exit_code or not knew

    def _reason(self, first: Rank, failed: Sequence[Rank]) -> str:
        """Why the run ended.  Of what others found, that of a rank which ended by itself follows
        from its end: the board that it kept is gone, say.
        """
        follows = first.exit_code == PeerError.exit_code
        for number, text in self._verdicts():
            if self._died(first) and (number == first.number or (number is None and follows)):
                return text
        error = first.notes.get("error") or first.notes.get("lost")
        if error is None:
            return first.describe()
        errors = {rank.notes["error"] for rank in failed if "error" in rank.notes}
        alone = sum("error" in rank.notes for rank in failed) == 1
        return f"rank {first.number}: {error}" if alone or len(errors) > 1 else error

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            self._again += 1
        self._signal = self._signal or signal.Signals(number)
        if self._again > 1:
            self._kill_at = time.monotonic()
        self._hand_on(number, frame)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        for rank in self._ranks:
            if rank.hears_signals:
                rank.send(number)
