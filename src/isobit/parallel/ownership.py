"""Which rows of every master a rank owns: their FP32 numbers, moments and gradient sums.

Masters are cut where a block of 128 rows begins, both of the whole and of the matrices that it
fuses, since quantisation blocks, groups of 8-bit moments and sums of the gradient's norm begin
there.  Every master is cut for all ranks; a remainder goes to the ranks that own least so far.

Where H hosts compute slots side by side (``isobit.parallel.gradient_sum``), each cuts the masters
for its own W / H ranks, and the rows of one of these are cut again for the ranks at its place on
all hosts.  So a master's rows belong, in order, to *places* (with one host, a rank's place is its
number):

    places 0 .. H - 1      rank 0 of host 0, rank 0 of host 1, ..
    places H .. 2 H - 1    rank 1 of host 0, rank 1 of host 1, ..

``complete`` sends each rank's rows to all others.  A call of the transport costs about as much as
sending a megabyte, so small tensors are packed together and large ones sent in groups.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from isobit.precision.quant_tensor import BLOCK


@dataclass(frozen=True, slots=True)
class Ownership:
    """Rows by master and rank."""

    size: int  # ranks
    cuts: Mapping[str, tuple[int, ...]]
    """Row bounds by master: place p owns the rows ``cuts[p]`` to ``cuts[p + 1]``, perhaps none."""
    hosts: int = 1

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Sequence[int]],
        size: int,
        hosts: int = 1,
    ) -> "Ownership":
        """Cut the masters of these shapes for ``size`` ranks on ``hosts`` hosts that compute side
        by side; ``parts`` are the rows of the matrices that a master fuses (absent: one matrix).
        """
        inside = size // hosts
        owned, owned_by_host = [0] * inside, [[0] * hosts for _ in range(inside)]
        cuts: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            bounds, width = _bounds(shape[0], parts.get(name) or (shape[0],)), prod(shape[1:])
            of_ranks, rows = _cut(bounds, width, owned), [0]
            if hosts == 1:
                cuts[name] = of_ranks
                continue
            for (first, last), of_hosts in zip(pairwise(of_ranks), owned_by_host, strict=True):
                within = bounds[bisect_left(bounds, first) : bisect_left(bounds, last) + 1]
                rows += _cut(within, width, of_hosts)[1:]
            cuts[name] = tuple(rows)
        return cls(size, cuts, hosts)

    @property
    def places(self) -> list[int]:
        """The place of each rank."""
        return [self._place(rank) for rank in range(self.size)]

    def rows(self, name: str, rank: int) -> slice:
        place = self._place(rank)
        return slice(self.cuts[name][place], self.cuts[name][place + 1])

    def of_host(self) -> "Ownership":
        """The ownership among the ranks of one host."""
        cuts = {name: at[:: self.hosts] for name, at in self.cuts.items()}
        return Ownership(self.size // self.hosts, cuts)

    def numbers(self, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> list[int]:
        """How many numbers each rank owns of some masters."""
        totals, places = [0] * self.size, self.places
        for name in names:
            cuts, width = self.cuts[name], prod(shapes[name][1:])
            for rank, place in enumerate(places):
                totals[rank] += (cuts[place + 1] - cuts[place]) * width
        return totals

    def _place(self, rank: int) -> int:
        host, inside = divmod(rank, self.size // self.hosts)
        return inside * self.hosts + host


def _bounds(rows: int, parts: Sequence[int]) -> list[int]:
    """Rows at which a master may be cut: 0, starts of blocks, and its number of rows."""
    starts, first = set[int](), 0
    for part in parts:
        starts.update(range(first, first + part, BLOCK))
        first += part
    return [*sorted(row for row in starts if row % BLOCK == 0), rows]


def _cut(bounds: Sequence[int], width: int, owned: list[int]) -> tuple[int, ...]:
    """Cut blocks into one run a rank, as even as whole blocks allow, the longer ones for the ranks
    that own least.  ``owned`` counts numbers by rank and is updated.
    """
    blocks, size = len(bounds) - 1, len(owned)
    least_first = sorted(range(size), key=lambda rank: (owned[rank], rank))
    more = set(least_first[: blocks % size])
    place, cuts = 0, [bounds[0]]
    for rank in range(size):
        place += blocks // size + (rank in more)
        cuts.append(bounds[place])
        owned[rank] += (cuts[-1] - cuts[-2]) * width
    return tuple(cuts)
