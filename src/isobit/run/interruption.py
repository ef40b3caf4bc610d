"""SIGTERM and Ctrl-C: the run stops where that is safe, and a second Ctrl-C stops it at once.

The first signal only raises a flag.  The run looks at it after every forward of the engine, between
grading and training, and after every step, so that a step is either finished or abandoned before it
has changed a weight.  Signals that the caller of the process has switched off (``nohup``) stay so.

Of several ranks, one that has a signal tells the others, who look now and then: so all engines stop
soon.  Where all ranks come by they agree, and all raise it or none.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from isobit.errors import Interrupted
from isobit.parallel.agreement import together
from isobit.parallel.world import ALONE, World
from isobit.rollout.progress import Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTE = "signal"
_LOOK_S = 0.5
"""Between two looks at what others have received: an engine's step is shorter."""


class Interruption:
    """Watches for a signal while it is entered; does nothing outside the main thread, where Python
    delivers none.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._look_at, self._has_told = 0.0, False
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has come, here or to another rank.  A rank that asks lives:
        its pulse beats.
        """
        self._world.pulse.beat()
        if self._world.size > 1:
            self._hear_others()
        if self._received is not None:
            raise Interrupted(self._received.name, self._received)

    def agree(self) -> None:
        """Raise Interrupted on all ranks if a signal has come to any; all ask at the same time."""
        together(self._world, self.check)

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
            if self._world.rank > 0:
                return
            # A handler may run in the middle of any print, so it writes past Python's buffers.
            name = self._received.name
            said = f"\n{name}: stopping where it is safe; Ctrl-C again stops at once\n"
            os.write(2, said.encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
