"""Where the time of a step goes: a timeline of marks, each the beginning of a phase, taken by CUDA
events on a GPU.

A phase inside another one interrupts it, so that the phases of a step add up to the step.  An event
is reached when the device has done all that was asked of it before; where the host waits for
nothing in between, work counts for the phase that asked for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from isobit.training.trainer import Trainer

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

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose every call is phase ``name``."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            with self(name):
                return function(*arguments, **keywords)

        return call

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


def watch(trainer: Trainer, phases: Phases) -> None:
    """Time a trainer's phases from here on: forward; backward, with the loss and the gradients'
    norm; clip and AdamW; publication.
    """
    for owner, method, name in (
        (trainer, "_forward", "forward"),
        (trainer, "_gradients", "backward"),
        (trainer, "_step", "optimiser"),
        (trainer.policy, "publish", "publish"),
    ):
        setattr(owner, method, phases.timed(name, getattr(owner, method)))
