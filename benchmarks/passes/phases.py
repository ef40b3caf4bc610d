"""Where the time of a step goes: a timeline of marks, each the beginning of a phase, taken by CUDA
events on a GPU.

A phase inside another one interrupts it, so that the phases of a step add up to the step.  An event
is reached when the device has done all that was asked of it before; where the host waits for
nothing in between, work counts for the phase that asked for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

Mark = tuple[str, Any]
"""The phase that begins, and the event or the time."""


class Phases:
    """Seconds by phase; what lies between phases is ``other``."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._inside = ["other"]
        self._marks: list[Mark] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The block is phase ``name``."""
        self._enter(name)
        try:
            yield
        finally:
            self._inside.pop()
            self._mark()

    def start(self) -> None:
        """Forget what was, and begin the timeline."""
        self._marks.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._mark()

    def stop(self) -> dict[str, float]:
        """End the timeline; seconds of every phase that occurred."""
        self._mark()
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (name, began), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + self._between(began, ended)
        return seconds

    def _enter(self, name: str) -> None:
        self._inside.append(name)
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = perf_counter()
        self._marks.append((self._inside[-1], now))

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) * 1e-3 if self._on_gpu else ended - began
