"""A series of exchanges between the same ranks, through receive buffers that are made once.

    exchange n      start     slices go to every other rank, into its buffer n % B
                    wait      what came is there, and what was sent may be written again

What exchange n - B brought must have been read, by work that the current stream has been given,
before exchange n starts: it comes into the same memory.  A buffer has a region for every other
rank, where its slices lie one behind the other.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

Slices = Sequence[Sequence[torch.Tensor]]
"""By rank."""


class Work(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Until it is there; on a GPU, until the stream may use it."""
        ...


class Arrival(Protocol):
    """One exchange on its way."""

    def wait(self) -> list[list[torch.Tensor]]:
        """The slices by the rank that sent them, flat; nothing from this one."""
        ...


class Exchanges(Protocol):
    """A series; every rank starts and awaits the same exchanges in the same order."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """``send[r]`` goes to rank r: FP32, contiguous.  ``sizes[r]`` are the numbers of each slice
        that comes from it.  Those of this rank are not looked at.
        """
        ...


def buffer_bytes(size: int, numbers: int, buffers: int) -> int:
    """What the receive buffers of a rank take, for exchanges that bring at most ``numbers`` FP32
    numbers from each of ``size`` ranks but itself.
    """
    return buffers * (size - 1) * numbers * torch.float32.itemsize


def slices_of(region: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Slices that lie one behind the other from the start of a region.  Raises AssertionError where
    they do not fit it.
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] <= region.numel(), (
        f"an exchange of {ends[-1]:,} numbers in a buffer for {region.numel():,}"
    )
    return [region[first:end] for first, end in pairwise(ends)]


class NoExchanges:
    """Of a rank alone."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """Nothing goes."""
        return self

    def wait(self) -> list[list[torch.Tensor]]:
        """Nothing comes."""
        return [[]]


class PostedExchanges:
    """By what moves slices between any two ranks: NCCL's or gloo's point to point."""

    def __init__(
        self,
        exchange: Callable[
            [Sequence[Sequence[torch.Tensor]], Sequence[Sequence[torch.Tensor]]], Work
        ],
        rank: int,
        size: int,
        numbers: int,
        device: torch.device,
        buffers: int,
    ) -> None:
        """``exchange`` is a world's; ``numbers`` what one rank sends to one other at most."""
        self._exchange = exchange
        self._regions = [
            [torch.empty(0 if source == rank else numbers, device=device) for source in range(size)]
            for _ in range(buffers)
        ]
        self._rank, self._started = rank, 0

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """See ``Exchanges``."""
        regions = self._regions[self._started % len(self._regions)]
        self._started += 1
        receive = [
            [] if source == self._rank else slices_of(region, sizes[source])
            for source, region in enumerate(regions)
        ]
        return _Posted(self._exchange(send, receive), receive)


class _Posted:
    def __init__(self, work: Work, receive: list[list[torch.Tensor]]) -> None:
        self._work, self._receive = work, receive

    def wait(self) -> list[list[torch.Tensor]]:
        """See ``Arrival``."""
        self._work.wait()
        return self._receive
