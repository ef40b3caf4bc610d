"""What one of several processes holds of a training: its rows of every master, which it also has
the moments and gradients of; and what gradients take on their way (``isobit.parallel``).

    made        a micro-batch's gradients before they are added up: of two layers, and of the tables
                at both ends; of one process alone what is added to in parts, lm_head
    arriving    the other processes' slices of such, from the first allocation to the last
    of a slot   with several slots (``training.slots``), the sums of one: of the rows that the
                process owns on its host

Each process holds all published weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, master_shapes
from isobit.parallel.exchanges import buffer_bytes
from isobit.parallel.gradient_sum import SumSizes
from isobit.parallel.ownership import Ownership
from isobit.parallel.slots import BUFFERS, ONE_SLOT, Slots, numbers_to_one

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Share:
    """Of the process that owns most numbers."""

    masters: tuple[int, ...]
    """Numbers that it owns of each master."""
    made: int
    """Bytes, throughout a forward and backward."""
    made_by_head: int
    """Bytes, while lm_head's gradient is made."""
    arriving: int
    """Bytes."""
    of_a_slot: int = 0
    """Bytes."""

    @property
    def numbers(self) -> int:
        """Of all masters."""
        return sum(self.masters)


@cache
def share_of(shape: ModelConfig, processes: int, slots: Slots = ONE_SLOT) -> Share:
    """Of a model that is trained by so many processes."""
    decoder = build_decoder(shape)
    shapes, in_parts = master_shapes(shape), decoder.added_in_parts
    groups, ownership = decoder.backward_groups(), decoder.ownership(processes, slots.hosts)
    of_host, owned = ownership.of_host(), _of_largest(ownership, shapes)
    of_a_slot = _FP32 * sum(_of_largest(of_host, shapes)) if slots.count > 1 else 0
    across = 0
    if slots.hosts > 1:
        across = buffer_bytes(slots.hosts, numbers_to_one(shapes, groups, ownership), BUFFERS)
    if of_host.size == 1:
        sums = _FP32 * sum(prod(shapes[name]) for name in in_parts)
        is_tied = bool(in_parts & set(groups[-1]))
        return Share(owned, sums if is_tied else 0, 0 if is_tied else sums, across, of_a_slot)
    sizes = SumSizes.of(shapes, groups, in_parts, of_host)
    made, arriving = _FP32 * sum(sizes.made.values()), sizes.arriving_bytes(of_host.size)
    return Share(owned, made, 0, arriving + across, of_a_slot)


def _of_largest(ownership: Ownership, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    owned = [ownership.numbers(shapes, [name]) for name in shapes]
    by_rank = list(zip(*owned, strict=True))
    return max(by_rank, key=sum)
