"""SIGTERM and Ctrl-C: the run stops where that is safe, and a second Ctrl-C stops it at once.

The first signal only raises a flag.  The run looks at it after every forward of the engine, between
grading and training, and after every step, so that a step is either finished or abandoned before it
has changed a weight.  Signals that the caller of the process has switched off (``nohup``) stay so.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from isobit.errors import Interrupted
from isobit.rollout.progress import Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Watches for a signal while it is entered; does nothing outside the main thread, where Python
    delivers none.
    """

    def __init__(self) -> None:
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
        """Raise Interrupted if a signal has come."""
        if self._received is not None:
            raise Interrupted(self._received.name, self._received)

    def watched(self, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """``progress`` for the engine, which then also stops generating when a signal has come."""

        def watch(moment: Progress) -> None:
            self.check()
            if progress is not None:
                progress(moment)

        return watch

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
            # A handler may run in the middle of any print, so it writes past Python's buffers.
            name = self._received.name
            said = f"\n{name}: stopping where it is safe; Ctrl-C again stops at once\n"
            os.write(2, said.encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
