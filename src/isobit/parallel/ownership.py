"""Who owns which rows of every master: its FP32 numbers, its moments and the sum of its gradients.

A master's rows are cut where a block of 128 rows begins, both of the whole and of the matrices that
it fuses: there begin a quantisation block, a group of 8-bit moments and a sum of the gradient's
norm.  Every master is cut for all ranks, so that a layer's gradients come from all and go to all;
what does not divide evenly goes to the ranks that have the least so far.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from isobit.precision.formats import BLOCK


@dataclass(frozen=True, slots=True)
class Ownership:
    """Rows by master and rank."""

    size: int
    """Ranks."""
    cuts: Mapping[str, tuple[int, ...]]
    """Of each master: rank r owns the rows from ``cuts[r]`` to ``cuts[r + 1]``, perhaps none."""

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Sequence[int]],
        size: int,
    ) -> "Ownership":
        """Masters by name, with the rows of each matrix that one fuses (none: it is one), for
        ``size`` ranks.
        """
        owned = [0] * size
        cuts: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            bounds = _bounds(shape[0], parts.get(name) or (shape[0],))
            cuts[name] = _cut(bounds, prod(shape[1:]), owned)
        return cls(size, cuts)

    def rows(self, name: str, rank: int) -> slice:
        """Of a master, those of a rank."""
        return slice(self.cuts[name][rank], self.cuts[name][rank + 1])

    def numbers(self, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> list[int]:
        """What each rank owns of some masters."""
        return [
            sum(
                (self.cuts[name][rank + 1] - self.cuts[name][rank]) * prod(shapes[name][1:])
                for name in names
            )
            for rank in range(self.size)
        ]


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
    place, cuts = 0, [0]
    for rank in range(size):
        place += blocks // size + (rank in more)
        cuts.append(bounds[place])
        owned[rank] += (cuts[-1] - cuts[-2]) * width
    return tuple(cuts)
