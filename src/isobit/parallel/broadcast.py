"""What one rank knows, on all: rank 0 reads and decides (``told``), or any makes (``spread``)."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from isobit.parallel.agreement import gathered
from isobit.parallel.message import decode, encode
from isobit.parallel.world import World

T = TypeVar("T")


def told(world: World, make: Callable[[], T]) -> T:
    """What rank 0 makes (``isobit.parallel.message``), on every rank, where ``make`` is not called;
    where it raises, every rank raises (``together``).

    It travels once to each rank, unlike a message, of which every rank gets everybody's.
    """
    return spread(world, 0, make if world.rank == 0 else None, partial(gathered, world))


def spread(
    world: World,
    source: int,
    make: Callable[[], Any] | None,
    agree: Callable[[Callable[[], int]], list[int]],
) -> Any:
    """What rank ``source`` makes, on every rank.  Others may make something, too, which counts for
    nothing; where a ``make`` raises, every rank raises, as ``agree`` does: ``gathered`` in this
    world.
    """
    made: list[bytes] = []

    def attempt() -> int:
        if make is None:
            return 0
        made.append(encode(make()))
        return len(made[0])

    size = agree(attempt)[source]
    sent = torch.empty(size, dtype=torch.uint8)
    if world.rank == source:
        sent = torch.frombuffer(bytearray(made[0]), dtype=torch.uint8)
    world.gather([sent], [[0] * (source + 1) + [size] * (world.size - source)])
    return decode(bytes(sent.numpy()))
