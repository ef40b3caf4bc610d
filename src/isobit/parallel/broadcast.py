"""What one rank knows, on all: rank 0 reads and decides, and every rank goes on from that."""

from collections.abc import Callable
from typing import TypeVar

import torch

from isobit.parallel.agreement import together
from isobit.parallel.message import decode, encode
from isobit.parallel.world import World

T = TypeVar("T")


def told(world: World, make: Callable[[], T]) -> T:
    """What rank 0 makes (``isobit.parallel.message``), on every rank, where ``make`` is not called;
    where it raises, every rank raises (``together``).

    It travels once to each rank, unlike a message, of which every rank gets everybody's.
    """
    data = together(world, lambda: encode(make()) if world.rank == 0 else b"")
    size = world.messages(len(data))[0]
    sent = torch.empty(size, dtype=torch.uint8)
    if world.rank == 0:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world.gather([sent], [[0, *[size] * world.size]])
    return decode(bytes(sent.numpy()))
