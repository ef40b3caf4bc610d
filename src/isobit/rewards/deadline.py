"""A deadline for a computation in this process, where one can be had.

An alarm of the operating system interrupts Python code, also code that survives any ``Exception``.
Python swallows what is raised while it collects garbage, in a destructor or in a callback; so the
alarm comes again until it is heard.
It exists in the main thread only, and it does not interrupt a library that never returns to Python:
the grading pool's own deadline, which ends the process, stands behind it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

AGAIN_S = 1.0
"""Longer than it takes to say what was swallowed."""


class DeadlineError(BaseException):
    """The time is over.  No ``Exception``, so that no library takes it for one of its own."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in what runs inside after ``seconds`` of wall-clock time.

    Outside the main thread nothing is bounded.  An alarm that was set before goes on afterwards.
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
    finally:  # an alarm that came on the way to the line above has skipped it
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    raise DeadlineError
