"""A limit on the wall-clock time of a block.

It is an alarm of the operating system, for the main thread only. It interrupts Python code even if
that catches every ``Exception``. Python swallows exceptions in destructors and callbacks, so the
alarm is repeated. It cannot interrupt a library that never
returns to Python; then the grading pool kills the process.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

AGAIN_S = 1.0
"""Longer than it takes Python to report a swallowed exception."""


class DeadlineError(BaseException):
    """The time is over. Not an ``Exception``, so that libraries do not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in the block after ``seconds`` of wall-clock time, in the main thread
    only. An alarm that was set before continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # an alarm just before the line above would skip it
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    raise DeadlineError
