"""The gradient of an update: the left fold of its micro-batches' gradients in FP32, whatever the
number of processes.

    gradient = ((G0 + G1) + G2) + ..        each Gi is one finished sum that started from zero

One process adds each Gi where it is made (``GradientSum``).  With W processes (``ExchangedSum``)
rank r makes the micro-batches r, r + W, .. in rounds of W.  A round's backward finishes one *group*
of masters after another, on all ranks in the same order.  The slices of a group go to the ranks
that own their rows while the next group is computed, and each owner adds them in the order of the
micro-batches.

    round k      rank 0: G(kW)    rank 1: G(kW + 1)   ..
    owner's sum  + slice of G(kW) + slice of G(kW + 1) + ..

A group's numbers lie end to end in a buffer; what arrives goes through
``isobit.parallel.exchanges``.  The layers' groups need two buffers: one is filled while the other
is sent.  The first and the last group, with the tables of lm_head and embedding, share another,
unless they are one tied table, to which a micro-batch adds from beginning to end.

Slots: an update's gradient in two levels, so that hosts exchange gradients once an update and
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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import torch

from isobit.parallel.exchanges import Arrival, buffer_bytes
from isobit.parallel.ownership import Ownership
from isobit.parallel.world import Alone, World

AddInOrder = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]  # ``Backend.add_in_order``
Shape = tuple[int, ...]
_ALIGNED = 64
"""Numbers: 256 bytes, the alignment of separate tensors, since kernels may be chosen by it."""
Groups = Sequence[Sequence[str]]  # names of masters, in the order in which a backward finishes them
Sums = Callable[[str], torch.Tensor]
"""The running FP32 sum of this rank's rows of a master; zeros where there is none yet."""
_END_BUFFERS, _LAYER_BUFFERS = 1, 2  # for the first and the last group, and for those between


@dataclass(frozen=True, slots=True)
class Targets:
    """What a backward adds to."""

    shapes: Mapping[str, Shape]  # of whole masters
    groups: Groups
    in_parts: frozenset[str]  # masters to which a micro-batch adds several times
    device: torch.device
    add_in_order: AddInOrder


def fold_of(
    targets: Targets, sums: Sums, ownership: Ownership, world: World
) -> "GradientSum | ExchangedSum":
    """The left fold of micro-batches into ``sums``, by all ranks of a world."""
    if world.size == 1:
        return GradientSum(targets, sums)
    return ExchangedSum(targets, sums, ownership, world)


class GradientSum:
    """The sum of one process.

    A master to which a micro-batch adds several times (lm_head in parts, or a tied table) has a
    tensor for that micro-batch's sum, which is added once.
    """

    def __init__(self, targets: Targets, sums: Sums) -> None:
        self._targets, self._sums = targets, sums
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """A master's FP32 gradient, to be added to; zeros where it has none yet."""
        targets = self._targets
        if name not in targets.in_parts:
            return self._sums(name)
        if name not in self._made:
            self._made[name] = torch.zeros(
                targets.shapes[name], device=targets.device, dtype=torch.float32
            )
        return self._made[name]

    def begin_round(self, active: int) -> None:
        """A micro-batch begins on the ranks below ``active``."""
        self._made.clear()  # of a micro-batch that was given up

    def done(self, group: int) -> None:
        """The micro-batch adds no more to the masters of a group."""
        for name in self._targets.groups[group]:
            if name in self._made:
                self._sums(name).add_(self._made.pop(name))

    def end_round(self) -> None:
        """All groups are done, or the round has failed."""

    def finish(self) -> None:
        """Complete the gradients after the last round."""

    def release(self) -> None:
        """Free the buffers until the next round."""
        self._made.clear()


@dataclass(slots=True)
class _Travelling:
    """A group whose slices are being exchanged."""

    group: int
    active: int  # ranks that have computed a micro-batch
    made: torch.Tensor
    arrival: Arrival


@dataclass(slots=True)
class _Layout:
    """The places of the masters of a group in its buffer."""

    shapes: Mapping[str, Shape]
    begins: dict[str, int] = field(default_factory=dict)
    numel: int = 0

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            self.begins[name] = self.numel
            self.numel += -(-prod(shape) // _ALIGNED) * _ALIGNED

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        begin, shape = self.begins[name], self.shapes[name]
        return buffer[begin : begin + prod(shape)].view(shape)


@dataclass(frozen=True, slots=True)
class SumSizes:
    """What ``ExchangedSum`` holds beside the gradients of its own rows, in FP32 numbers."""

    made: Mapping[str, int]  # by buffer that micro-batches are summed in, during an update
    ends: int  # the most that a rank sends to another of the first or last group
    layers: int  # the same of the groups between

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Shape],
        groups: Groups,
        in_parts: frozenset[str],
        ownership: Ownership,
    ) -> "SumSizes":
        made: dict[str, int] = {}
        for place, names in zip(_places(groups, in_parts), groups, strict=True):
            numel = _Layout({name: shapes[name] for name in names}).numel
            made[place] = max(made.get(place, 0), numel)
        sent = [max(ownership.numbers(shapes, names)) for names in groups]
        return cls(made, max(sent[0], sent[-1]), max(sent[1:-1]))

    def arriving_bytes(self, size: int) -> int:
        """Bytes of the receive buffers with ``size`` ranks, as long as the world exists."""
        return buffer_bytes(size, self.ends, _END_BUFFERS) + buffer_bytes(
            size, self.layers, _LAYER_BUFFERS
        )


class ExchangedSum:
    """The sum of several processes."""

    def __init__(self, targets: Targets, sums: Sums, ownership: Ownership, world: World) -> None:
        shapes, groups = targets.shapes, targets.groups
        self._add_in_order, self._device = targets.add_in_order, targets.device
        self._sums, self._ownership, self._world = sums, ownership, world
        self._groups = groups
        self._places = _places(groups, targets.in_parts)
        self._group_of = {name: place for place, names in enumerate(groups) for name in names}
        self._whole = [_Layout({name: shapes[name] for name in names}) for names in groups]
        self._own = {name: ownership.numbers(shapes, [name])[world.rank] for name in shapes}
        """Numbers of each master that this rank owns."""
        self._made: dict[str, torch.Tensor] = {}  # by place
        self._open: set[int] = set()  # groups that something was added to in this round
        self._travelling: _Travelling | None = None  # the group that was sent last in this round
        self._last: _Travelling | None = None
        """The last group of the round before, exchanged during the next forward."""
        self._active = self._next = 0
        self._sizes = SumSizes.of(shapes, groups, targets.in_parts, ownership)
        self._of_ends = world.exchanges(self._sizes.ends, self._device, _END_BUFFERS)
        self._of_layers = world.exchanges(self._sizes.layers, self._device, _LAYER_BUFFERS)

    def __call__(self, name: str) -> torch.Tensor:
        """This micro-batch's whole FP32 gradient of a master, to be added to."""
        group = self._group_of[name]
        if group not in self._open:
            self._begin(group)
        return self._whole[group].view(self._buffer(group), name)

    def begin_round(self, active: int) -> None:
        """A micro-batch begins on the ranks below ``active``; allocates what the round needs."""
        assert self._travelling is None, "a round ends before the next"
        self._active, self._next = active, 0
        self._open.clear()
        for group in range(len(self._groups)):
            self._buffer(group)
        for name in self._own:
            self._sums(name)

    def done(self, group: int) -> None:
        """Send a finished group, and add what has arrived of the one before."""
        assert group == self._next, "groups are finished in their order, on every rank"
        if self._is_active and group not in self._open:
            self._begin(group)  # nothing was added to it: zeros
        self._send(group)

    def end_round(self) -> None:
        """Send the groups that are left, and add all that has arrived but for the last group.  An
        inactive rank does its whole round here; what a failed rank sends is not used.
        """
        while self._next < len(self._groups):
            self._send(self._next)
        self._last, self._travelling = self._travelling, None

    def finish(self) -> None:
        """Add the last group of the last round."""
        last, self._last = self._last, None
        if last is not None:
            self._settle(last)

    def release(self) -> None:
        """Free the buffers until the next round; discards what is still being exchanged."""
        last, self._last = self._last, None
        if last is not None:
            last.arrival.wait()
        self._made.clear()

    @property
    def _is_active(self) -> bool:
        return self._world.rank < self._active

    def _begin(self, group: int) -> None:
        """Zeros for a micro-batch's sums."""
        self.finish()  # the last group of the round before may lie in the same buffer
        self._buffer(group)[: self._whole[group].numel].zero_()
        self._open.add(group)

    def _send(self, group: int) -> None:
        """Send each slice to its owner, and add what has arrived of the group before."""
        self.finish()
        made, rank, size = self._buffer(group), self._world.rank, self._world.size
        names = self._groups[group]
        send: list[list[torch.Tensor]] = [[] for _ in range(size)]
        if self._is_active:
            for name in names:
                whole = self._whole[group].view(made, name)
                for owner, slices in enumerate(send):
                    slices.append(whole[self._ownership.rows(name, owner)])
        own = [self._own[name] for name in names]
        comes = [own if one < self._active and one != rank else [] for one in range(size)]
        is_end = group in (0, len(self._groups) - 1)
        series = self._of_ends if is_end else self._of_layers
        before = self._travelling
        self._travelling = _Travelling(group, self._active, made, series.start(send, comes))
        self._next = group + 1
        if before is not None:
            self._settle(before)

    def _settle(self, travelling: _Travelling) -> None:
        """Add the slices of all micro-batches of the round, in their order."""
        arrived, group, rank = travelling.arrival.wait(), travelling.group, self._world.rank
        names = self._groups[group]
        if rank < travelling.active:
            whole = [self._whole[group].view(travelling.made, name) for name in names]
            rows = [self._ownership.rows(name, rank) for name in names]
            arrived[rank] = [made[own] for made, own in zip(whole, rows, strict=True)]
        for place, name in enumerate(names):
            slices = [arrived[source][place].view(-1) for source in range(travelling.active)]
            self._add_in_order(self._sums(name).view(-1), slices)

    def _buffer(self, group: int) -> torch.Tensor:
        """The buffer of a group, as large as the largest group of its place."""
        place = self._places[group]
        if place not in self._made:
            self._made[place] = torch.empty(
                self._sizes.made[place], device=self._device, dtype=torch.float32
            )
        return self._made[place]


def _places(groups: Groups, in_parts: frozenset[str]) -> list[str]:
    """The buffer of each group."""
    layers = [f"layers {place % 2}" for place in range(len(groups) - 2)]
    ends = ("first", "last") if in_parts & set(groups[-1]) else ("ends", "ends")
    return [ends[0], *layers, ends[1]]


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
        slots = arrival.wait()
        slots[self.host] = [self._slot(name)[self._rows[name][self.host]] for name in names]
        for place, name in enumerate(names):
            slices = [of_host[place].view(-1) for of_host in slots]
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
