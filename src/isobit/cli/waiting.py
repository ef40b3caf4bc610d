"""While the heavy libraries are imported, which takes seconds on a cold disk: a live line, and a
signal that asks a run for a checkpoint is no end of one that has not begun.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from isobit.parallel.signals import SAVES
from isobit.terminal import Standard, tell


def starting() -> AbstractContextManager[object]:
    """A spinner on stderr, gone afterwards; nothing without a terminal."""
    from typing import TextIO, cast

    from rich.console import Console

    console = Console(file=cast(TextIO, Standard("stderr")))
    return console.status("starting") if console.is_terminal else nullcontext()


@contextmanager
def requests_wait() -> Iterator[None]:
    """A block in which a signal to save, which would end the process, is answered with a line; the
    run takes it over (``isobit.run.interruption``).
    """
    before = signal.getsignal(SAVES)
    if threading.current_thread() is not threading.main_thread() or before != signal.SIG_DFL:
        yield
        return
    signal.signal(SAVES, lambda *_: tell(f"{SAVES.name}: there is nothing to save"))
    try:
        yield
    finally:
        signal.signal(SAVES, before)
