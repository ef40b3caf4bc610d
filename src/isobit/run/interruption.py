"""Signals that interrupt a run (``isobit.parallel.launched``).

The run stops where that is safe, or saves where it stands and goes on.  A signal only raises a
flag.  The run looks at it after every forward of the engine, many times a second while it grades,
between grading and training, and after every step, so that a step is either finished or abandoned
before it has changed a weight.  Signals that the caller of the process has switched off (``nohup``)
stay so.

Of several ranks, one that has a signal to stop posts it for the others, who look every half second:
so all engines stop soon.  Where all ranks meet they agree, and all raise Interrupted or none does.
There they also agree on a checkpoint, whichever of them was asked for it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from isobit.parallel.launched import SAVES, STOPS
from isobit.parallel.world import ALONE, World, run_and_gather
from isobit.rollout.engine_stats import Progress
from isobit.util.errors import Interrupted, StoppedAtOnce
from isobit.util.terminal import tell

_NOTE = "signal"
_LOOK_S = 0.5
"""Seconds between two looks at what others have received; an engine's step is shorter."""


class Interruption:
    """Watches for signals: for one to save from ``open_to_requests`` on, for those to stop while it
    is entered.  Does nothing outside the main thread, where Python delivers none.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._look_at, self._has_told = 0.0, False
        self._received: signal.Signals | None = None
        self._is_to_save = self._answers_at_once = False
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def open_to_requests(self) -> Iterator[None]:
        """A block in which a signal to save is kept until the run looks; it would end the process
        otherwise.
        """
        before = _heard((SAVES,), self._note_request)
        try:
            yield
        finally:
            _unheard(before)

    def __enter__(self) -> Self:
        self._before = _heard(STOPS, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        _unheard(self._before)

    def check(self) -> None:
        """Raise Interrupted if a signal to stop has come, here or to another rank.  A rank that
        asks lives: its pulse beats.
        """
        self._world.pulse.beat()
        if self._world.size > 1:
            self._hear_others()
        if self._received is not None:
            raise Interrupted(self._received.name, self._received)

    def agree(self, check: Callable[[], None] | None = None) -> bool:
        """Raise Interrupted on all ranks if a signal to stop has come to any, and what ``check``
        raises on any; all ask at the same time.  -> Without ``check``, whether any was asked to
        save since it was last said.
        """

        def look() -> bool:
            self.check()
            if check is not None:
                check()
                return False
            was_asked, self._is_to_save = self._is_to_save, False
            return was_asked

        return any(run_and_gather(self._world, look))

    @contextmanager
    def answered_at_once(self) -> Iterator[None]:
        """A block of code that is not ours and changes nothing of the run, a reward in this
        process: a signal to stop raises Interrupted in the middle of it.
        """
        self._answers_at_once = True
        try:
            yield
        finally:
            self._answers_at_once = False

    def watched(self, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """``progress`` for the engine, which then also stops generating when a signal has come."""

        def watch(moment: Progress) -> None:
            self.check()
            if progress is not None:
                progress(moment)

        return watch

    def _hear_others(self) -> None:
        board, mine = self._world.board, self._received
        if mine is not None and not self._has_told:
            board.post(_NOTE, str(int(mine)).encode())
            self._has_told = True
        elif mine is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            note = board.read(_NOTE)
            self._received = signal.Signals(int(note)) if note is not None else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
            if self._world.rank == 0:
                name = self._received.name
                tell(f"\n{name}: stopping where it is safe; Ctrl-C again stops at once")
        elif number == signal.SIGINT:
            raise StoppedAtOnce
        if self._answers_at_once:
            raise Interrupted(self._received.name, self._received)

    def _note_request(self, number: int, frame: FrameType | None) -> None:
        self._is_to_save = True
        if self._world.rank == 0:
            tell(f"\n{signal.Signals(number).name}: a checkpoint after this step, then on")


def _heard(
    numbers: tuple[signal.Signals, ...], hear: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """What was done at these signals before ``hear``, but for those that are switched off."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    off = (signal.SIG_IGN, None)  # None: by code that is not Python's
    wanted = [number for number in numbers if signal.getsignal(number) not in off]
    return {number: signal.signal(number, hear) for number in wanted}


def _unheard(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
