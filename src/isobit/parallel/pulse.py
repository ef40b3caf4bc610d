"""What a process is doing, for those who watch it: the phase of the run, how often it has shown
progress, and whether it waits for others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Pulse:
    """Of one process.  Beaten by the thread that works, read by the one that watches."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.beats = 0
        self.waits_for: str | None = None
        """The collective that it is in; None while it computes."""
        self._waited = 0.0
        self.on_phase: Callable[[str], None] | None = None
        """Told when another phase begins."""

    def beat(self, phase: str | None = None) -> None:
        """Something was done; with ``phase``, another part of the run begins."""
        if phase is not None and phase != self.phase:
            self.phase = phase
            if self.on_phase is not None:
                self.on_phase(phase)
        self.beats += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that ends when the other processes have come as far."""
        outer, self.waits_for = self.waits_for, self.waits_for or what
        began = perf_counter()
        try:
            yield
        finally:
            self.waits_for = outer
            self.beats += 1
            if outer is None:
                self._waited += perf_counter() - began

    def take_waited(self) -> float:
        """Seconds in such blocks since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited
