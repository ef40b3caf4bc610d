"""Who owns which rows of every master: its FP32 numbers, its moments and the sum of its gradients.

A master's rows are cut where a block of 128 rows begins, both of the whole and of the matrices that
it fuses: there begin a quantisation block, a group of 8-bit moments and a sum of the gradient's
norm.  Every master is cut for all ranks, so that a layer's gradients come from all and go to all;
what does not divide evenly goes to the ranks that have the least so far.

Where H hosts compute slots side by side (``isobit.parallel.slots``), each cuts the masters for its
own W / H ranks, and the rows of one of these are cut again for the ranks that have its place on all
hosts.  So a master's rows belong, from the first to the last, to *places*:

    places 0 .. H - 1      rank 0 of host 0, rank 0 of host 1, ..
    places H .. 2 H - 1    rank 1 of host 0, rank 1 of host 1, ..

With one host a rank's place is its number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from isobit.precision.formats import BLOCK


@dataclass(frozen=True, slots=True)
class Ownership:
    """Rows by master and rank."""

    size: int
    """Ranks."""
    cuts: Mapping[str, tuple[int, ...]]
    """Of each master: to place p belong the rows from ``cuts[p]`` to ``cuts[p + 1]``, perhaps
    none.
    """
    hosts: int = 1

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Sequence[int]],
        size: int,
        hosts: int = 1,
    ) -> "Ownership":
        """Masters by name, with the rows of each matrix that one fuses (none: it is one), for
        ``size`` ranks, as many on each of ``hosts`` that compute side by side.
        """
        inside = size // hosts
        owned, owned_by_host = [0] * inside, [[0] * hosts for _ in range(inside)]
        cuts: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            bounds, width = _bounds(shape[0], parts.get(name) or (shape[0],)), prod(shape[1:])
            found = [0]
            for (first, last), of_hosts in zip(
                pairwise(_cut(bounds, width, owned)), owned_by_host, strict=True
            ):
                within = [row for row in bounds if first <= row <= last]
                found += _cut(within, width, of_hosts)[1:]
            cuts[name] = tuple(found)
        return cls(size, cuts, hosts)

    @property
    def places(self) -> list[int]:
        """By rank."""
        return [self._place(rank) for rank in range(self.size)]

    def rows(self, name: str, rank: int) -> slice:
        """Of a master, those of a rank."""
        place = self._place(rank)
        return slice(self.cuts[name][place], self.cuts[name][place + 1])

    def of_host(self) -> "Ownership":
        """Among the ranks of one host."""
        cuts = {name: at[:: self.hosts] for name, at in self.cuts.items()}
        return Ownership(self.size // self.hosts, cuts)

    def numbers(self, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> list[int]:
        """What each rank owns of some masters."""
        return [
            sum(
                (rows.stop - rows.start) * prod(shapes[name][1:])
                for name in names
                for rows in [self.rows(name, rank)]
            )
            for rank in range(self.size)
        ]

    def _place(self, rank: int) -> int:
        host, inside = divmod(rank, self.size // self.hosts)
        return inside * self.hosts + host


def _bounds(rows: int, parts: Sequence[int]) -> list[int]:
    """Where a master may be cut: 0, the rows, and the starts of blocks between them."""
    starts, first = set[int](), 0
    for part in parts:
        starts.update(range(first, first + part, BLOCK))
        first += part
    return [*sorted(row for row in starts if row % BLOCK == 0), rows]


def _cut(bounds: Sequence[int], width: int, owned: list[int]) -> tuple[int, ...]:
    """Cut blocks into runs, one a rank in the order of ranks, as even as whole blocks allow; the
    longer runs to those who own least.  ``owned`` counts numbers by rank.
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
