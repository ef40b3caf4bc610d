"""Ranks as threads of one process, for what only stacks tensors and exchanges messages: no imports
to wait for.  ``in_ranks(2, work)`` calls ``work(world)`` in so many, and gives what each returned.

One thread runs at a time, until it waits for the others; so they also share one GPU and its stream.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, TypeVar

import torch

from isobit.parallel.world import Alone

T = TypeVar("T")
_SECONDS = 120


class _Rank(Alone):
    """One thread's view."""

    def __init__(
        self, rank: int, size: int, places: list[Any], barrier: Barrier, turn: Lock
    ) -> None:
        super().__init__()
        self.rank, self.size, self.numbers = rank, size, tuple(range(size))
        self._places, self._barrier, self._turn = places, barrier, turn

    def all_gather(self, mine: Any) -> list[Any]:
        """What all have brought, once all have."""
        self._places[self.rank] = mine
        self._wait()
        found = list(self._places)
        self._wait()
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def shared(self, size: int, device: torch.device) -> list[torch.Tensor]:
        """The same memory for all threads."""
        return self.all_gather(torch.empty(size, dtype=torch.uint8, device=device))

    def barrier(self, what: str) -> None:
        self.all_gather(None)

    def all_gather_stack(self, mine: torch.Tensor) -> torch.Tensor:
        """As NCCL and gloo: of one shape and format, contiguous."""
        assert mine.is_contiguous()
        found = self.all_gather(mine)
        assert all((x.shape, x.dtype) == (mine.shape, mine.dtype) for x in found)
        return torch.stack([x.view(torch.uint8) for x in found]).view(mine.dtype)


def in_ranks(size: int, work: Callable[[Any], T]) -> list[T]:
    """What each rank returned; an error of one is raised."""
    places, barrier, turn = [None] * size, Barrier(size, timeout=_SECONDS), Lock()

    def run(rank: int) -> T:
        try:
            with turn:
                return work(_Rank(rank, size, places, barrier, turn))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
