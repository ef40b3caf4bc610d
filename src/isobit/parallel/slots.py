"""Slots: an update's gradient in two levels, so that hosts exchange gradients once an update and
not once a micro-batch.  Micro-batch i belongs to slot i mod S:

    slot s      = ((0 + G[s]) + G[s + S]) + G[s + 2 S] ..
    gradient    = ((0 + slot 0) + slot 1) + ..

The bits depend on S (``training.slots``) but not on ranks or hosts; one slot is the plain fold.  H
hosts with equally many ranks, H a divisor of S, compute H slots side by side, in S / H passes;
otherwise all ranks compute one slot after the other.

    pass p      host h: slot p H + h, by its own ranks; each adds to the rows that it owns there
    then        ranks with the same place on their hosts exchange these rows, and the owner of each
                (``isobit.parallel.ownership``) adds the slots to the gradient, in their order

A slot has its own sums of the rows that a rank owns on its host, beside the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from isobit.parallel.exchanges import Arrival
from isobit.parallel.gradient_sum import Groups, Sums, Targets, fold_of
from isobit.parallel.ownership import Ownership
from isobit.parallel.world import Alone, World


@dataclass(frozen=True, slots=True)
class Slots:
    count: int = 1
    hosts: int = 1  # hosts that compute slots side by side: a divisor of ``count``

    @classmethod
    def of(cls, count: int, world: World) -> "Slots":
        """``count`` slots on the hosts of a world; collective."""
        return cls(count, _side_by_side(world.all_gather(world.host), count))


ONE_SLOT = Slots()
BUFFERS = 2  # receive buffers for what other hosts send


def _side_by_side(hosts: Sequence[str], count: int) -> int:
    """How many hosts compute slots side by side, from the host of each rank."""
    runs = [len(list(ranks)) for _, ranks in groupby(hosts)]
    are_equal = len(set(runs)) == 1 and len(runs) == len(set(hosts))
    return len(runs) if are_equal and count % len(runs) == 0 else 1


def numbers_to_one(
    shapes: Mapping[str, tuple[int, ...]], groups: Groups, ownership: Ownership
) -> int:
    """The most FP32 numbers of a group that a rank gets from another host."""
    return max(max(ownership.numbers(shapes, names)) for names in groups)


class SlotSum:
    """The gradient of an update with several slots."""

    def __init__(
        self, slots: Slots, targets: Targets, gradient: Sums, ownership: Ownership, world: World
    ) -> None:
        """``gradient`` has the rank's rows by ``ownership``, which is cut for the slots' hosts."""
        inside, self._names = world.size // slots.hosts, targets.groups
        self.slots = slots
        self.host, place = divmod(world.rank, inside)
        """This rank's host among those that compute side by side."""
        self.group, self._across = world, Alone()  # the ranks that compute a slot together
        if slots.hosts > 1:
            self.group = world.split(range(0, world.size + 1, inside))
            self._across = world.split_groups(
                [range(one, world.size, inside) for one in range(inside)]
            )
        of_host = ownership.of_host()
        begins = {name: of_host.rows(name, place).start for name in targets.shapes}
        self._rows = {
            name: [
                slice(rows.start - first, rows.stop - first)
                for host in range(slots.hosts)
                for rows in [ownership.rows(name, host * inside + place)]
            ]
            for name, first in begins.items()
        }
        """By host, the rows of a slot that the rank at this place owns there."""
        shapes = {
            name: (of_host.rows(name, place).stop - first, *targets.shapes[name][1:])
            for name, first in begins.items()
        }
        self._slot = _HeldSums(shapes, targets.device)
        self._gradient, self._add_in_order = gradient, targets.add_in_order
        self._fold = fold_of(targets, self._slot, of_host, self.group)
        most = numbers_to_one(targets.shapes, targets.groups, ownership)
        self._series = self._across.exchanges(most, targets.device, BUFFERS)

    def __call__(self, name: str) -> torch.Tensor:
        """What a micro-batch adds to, of a master."""
        return self._fold(name)

    def begin_slot(self) -> None:
        """Zero the sums of a slot, and allocate all that ``add_slots`` needs."""
        self._slot.begin()
        for names in self._names:
            for name in names:
                self._gradient(name)

    def begin_round(self, active: int) -> None:
        """A micro-batch of the slot begins on the ranks of ``group`` below ``active``."""
        self._fold.begin_round(active)

    def done(self, group: int) -> None:
        self._fold.done(group)

    def end_round(self) -> None:
        self._fold.end_round()

    def add_slots(self) -> None:
        """Add the slot of each host to the gradient; collective."""
        self._fold.finish()
        before: tuple[Sequence[str], Arrival] | None = None
        for names in self._names:
            arrival = self._send(names)
            if before is not None:
                self._settle(*before)
            before = names, arrival
        assert before is not None
        self._settle(*before)

    def finish(self) -> None:
        """Nothing is left to add."""

    def release(self) -> None:
        """Free the buffers until the next slot."""
        self._fold.release()
        self._slot.release()

    def _send(self, names: Sequence[str]) -> Arrival:
        """Send the slot's rows to their owners."""
        hosts = range(self.slots.hosts)
        send = [[self._slot(name)[self._rows[name][host]] for name in names] for host in hosts]
        own = [self._gradient(name).numel() for name in names]
        return self._series.start(send, [[] if host == self.host else own for host in hosts])

    def _settle(self, names: Sequence[str], arrival: Arrival) -> None:
        """Add the slots, in their order."""
        found = arrival.wait()
        found[self.host] = [self._slot(name)[self._rows[name][self.host]] for name in names]
        for place, name in enumerate(names):
            slices = [of_host[place].view(-1) for of_host in found]
            self._add_in_order(self._gradient(name).view(-1), slices)


class _HeldSums:
    """Sums of the rows that a rank owns on its host."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self._sums: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        return self._sums[name]

    def begin(self) -> None:
        """Zero all sums."""
        for name, shape in self._shapes.items():
            if name in self._sums:
                self._sums[name].zero_()
            else:
                self._sums[name] = torch.zeros(shape, device=self._device, dtype=torch.float32)

    def release(self) -> None:
        self._sums.clear()
