"""The gradient of a step: the left fold of its micro-batches' gradients, in FP32, whatever the
number of processes.

    gradient = ((G0 + G1) + G2) + ..        each Gi one finished sum, begun from zero

One process adds each Gi where it is made (``GradientSum``).  Of W processes (``ExchangedSum``) rank
r makes the micro-batches r, r + W, .. in rounds of W.  In the backward of a round, a *group* of
masters after the other is finished, on all ranks in the same order; its slices then go to the ranks
that own their rows, while the group before it is computed, and each owner adds them in the order of
the micro-batches.  Nothing but the owners adds.

    round k      rank 0: G(kW)    rank 1: G(kW + 1)   ..
    owner's sum  + slice of G(kW) + slice of G(kW + 1) + ..

A group's numbers lie end to end in one buffer a rank, and so does what arrives from each other
rank.  Of the layers' groups two buffers are enough: one is filled while the other travels.  The
first and the last group, with the tables of lm_head and embedding, share another, unless they are
one table, to which a micro-batch adds from its beginning to its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from isobit.parallel.ownership import Ownership
from isobit.parallel.world import Work, World

Shape = tuple[int, ...]
Groups = Sequence[Sequence[str]]
"""Masters by name, in the order in which a backward finishes them."""


class GradientSum:
    """Of one process.

    A master to which a micro-batch adds several times (lm_head part by part; a tied table as head
    and as embedding) has a tensor for that micro-batch's sum, which is added once.
    """

    def __init__(
        self, masters: Mapping[str, torch.nn.Parameter], groups: Groups, in_parts: frozenset[str]
    ) -> None:
        """``in_parts``: masters to which a micro-batch adds several times."""
        self._masters, self._groups, self._in_parts = masters, groups, in_parts
        self._sums: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """A master's FP32 gradient, to be added to; zeros where it has none yet."""
        if name not in self._in_parts:
            return _gradient(self._masters[name])
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(self._masters[name].detach())
        return self._sums[name]

    def begin_round(self, active: int) -> None:
        """A micro-batch begins on the ranks below ``active``."""
        self._sums.clear()  # of a micro-batch that was given up

    def done(self, group: int) -> None:
        """The micro-batch adds no more to the masters of a group."""
        for name in self._groups[group]:
            if name in self._sums:
                _gradient(self._masters[name]).add_(self._sums.pop(name))

    def end_round(self) -> None:
        """All groups are done, or nothing that was made counts."""

    def release(self) -> None:
        """Hold no memory until the next round."""
        self._sums.clear()


@dataclass(slots=True)
class _Buffers:
    """Of one group at a time: what this rank makes, and what arrives from each other rank."""

    made: torch.Tensor
    arrived: Mapping[int, torch.Tensor]


@dataclass(slots=True)
class _Travelling:
    """A group whose slices are on their way."""

    group: int
    buffers: _Buffers
    work: Work


@dataclass(slots=True)
class _Layout:
    """Where the masters of a group lie in its buffers."""

    shapes: Mapping[str, Shape]
    begins: dict[str, int] = field(default_factory=dict)
    numel: int = 0

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            self.begins[name] = self.numel
            self.numel += prod(shape)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        begin, shape = self.begins[name], self.shapes[name]
        return buffer[begin : begin + prod(shape)].view(shape)


class ExchangedSum:
    """Of several processes."""

    def __init__(
        self,
        masters: Mapping[str, torch.nn.Parameter],
        shapes: Mapping[str, Shape],
        groups: Groups,
        in_parts: frozenset[str],
        ownership: Ownership,
        world: World,
    ) -> None:
        """``masters`` hold this rank's rows, ``shapes`` are those of the whole; ``in_parts`` as of
        ``GradientSum``.
        """
        self._masters, self._ownership, self._world = masters, ownership, world
        self._groups = groups
        self._places = _places(groups, in_parts)
        self._group_of = {name: place for place, names in enumerate(groups) for name in names}
        self._whole = [_Layout({name: shapes[name] for name in names}) for names in groups]
        self._own = [
            _Layout({name: tuple(masters[name].shape) for name in names}) for names in groups
        ]
        self._buffers: dict[str, _Buffers] = {}
        self._open: set[int] = set()
        """Groups that something was added to in this round."""
        self._travelling: list[_Travelling] = []
        self._active = self._next = 0

    def __call__(self, name: str) -> torch.Tensor:
        """A master's FP32 gradient of this micro-batch, whole, to be added to."""
        group = self._group_of[name]
        if group not in self._open:
            self._begin(group)
        return self._whole[group].view(self._of(group).made, name)

    def begin_round(self, active: int) -> None:
        """A micro-batch begins on the ranks below ``active``, on this one too if it is among them;
        all that the round needs is allocated.
        """
        assert not self._travelling, "a round ends before the next"
        self._active, self._next = active, 0
        self._open.clear()
        for group in range(len(self._groups)):
            self._of(group)

    def done(self, group: int) -> None:
        """The micro-batch adds no more to the masters of a group: send it, and add up what has
        arrived of the one before.
        """
        assert group == self._next, "groups are finished in their order, on every rank"
        if self._is_active and group not in self._open:
            self._begin(group)  # nothing was added to it: zeros
        self._send(group)
        while len(self._travelling) > 1:
            self._settle(self._travelling.pop(0))

    def end_round(self) -> None:
        """Take part in what is left of the round, and add up all that has arrived.  On a rank that
        is not active, that is the whole round; on one that failed, what it sends means nothing.
        """
        while self._next < len(self._groups):
            self._send(self._next)
            while len(self._travelling) > 1:
                self._settle(self._travelling.pop(0))
        while self._travelling:
            self._settle(self._travelling.pop(0))

    def release(self) -> None:
        """Hold no memory until the next round."""
        self._buffers.clear()

    @property
    def _is_active(self) -> bool:
        return self._world.rank < self._active

    def _begin(self, group: int) -> None:
        """Zeros for a micro-batch's sums."""
        self._of(group).made[: self._whole[group].numel].zero_()
        self._open.add(group)

    def _send(self, group: int) -> None:
        """Each slice to its owner."""
        buffers, rank = self._of(group), self._world.rank
        send: list[list[torch.Tensor]] = [[] for _ in range(self._world.size)]
        receive: list[list[torch.Tensor]] = [[] for _ in range(self._world.size)]
        if self._is_active:
            for name in self._groups[group]:
                made = self._whole[group].view(buffers.made, name)
                for owner, slices in enumerate(send):
                    slices.append(made[self._ownership.rows(name, owner)])
        for source in range(self._active):
            if source != rank:
                receive[source] = [
                    self._own[group].view(buffers.arrived[source], name)
                    for name in self._groups[group]
                ]
        work = self._world.exchange(send, receive)
        self._travelling.append(_Travelling(group, buffers, work))
        self._next = group + 1

    def _settle(self, arrived: _Travelling) -> None:
        """Add the slices of all micro-batches of the round, in their order."""
        arrived.work.wait()
        group, rank = arrived.group, self._world.rank
        for source in range(self._active):
            if source == rank:
                layout, buffer = self._whole[group], arrived.buffers.made
            else:
                layout, buffer = self._own[group], arrived.buffers.arrived[source]
            for name in self._groups[group]:
                slices = layout.view(buffer, name)
                if source == rank:
                    slices = slices[self._ownership.rows(name, rank)]
                _gradient(self._masters[name]).add_(slices)

    def _of(self, group: int) -> _Buffers:
        """The buffers of a group, as large as the largest group that uses them."""
        place = self._places[group]
        if place not in self._buffers:
            device = next(iter(self._masters.values())).device
            sharing = [one for one, where in enumerate(self._places) if where == place]
            made = max(self._whole[one].numel for one in sharing)
            own = max(self._own[one].numel for one in sharing)
            others = [rank for rank in range(self._world.size) if rank != self._world.rank]
            self._buffers[place] = _Buffers(
                torch.empty(made, device=device),
                {rank: torch.empty(own, device=device) for rank in others},
            )
        return self._buffers[place]


def _places(groups: Groups, in_parts: frozenset[str]) -> list[str]:
    """The buffer of each group."""
    layers = [f"layers {place % 2}" for place in range(len(groups) - 2)]
    ends = ("first", "last") if in_parts & set(groups[-1]) else ("ends", "ends")
    return [ends[0], *layers, ends[1]]


def _gradient(master: torch.nn.Parameter) -> torch.Tensor:
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
