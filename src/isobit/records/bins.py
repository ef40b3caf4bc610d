"""Which sequences are laid end to end together, within a budget of tokens.

First-fit decreasing: longest first, each into the first bin with room for it.  That fills the bins
(never more than 11/9 of the fewest possible, and one) and puts sequences of similar length side by
side, which is what the attention over a packed batch likes.  Ties keep the order given, so that the
same sequences make the same bins.

The first bin with room is found in a tree of the largest rooms, in log n steps: every rank packs
the step of all, and hundreds of GPUs have 100,000 sequences.
"""

from collections.abc import Sequence

_FULL = -1


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``lengths``, cut into bins whose lengths sum to at most ``budget``, or that hold
    one index.
    """
    bins: list[list[int]] = []
    rooms = _Rooms(len(lengths), budget)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = rooms.first(lengths[index]) if lengths[index] <= budget else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        rooms.fill(place, lengths[index])
    return bins


class _Rooms:
    """Room of every bin, those not yet begun too: node i of a tree has the larger one of its
    children 2 i and 2 i + 1, the leaves are the bins.
    """

    def __init__(self, bins: int, budget: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._largest = [budget] * (2 * self._leaves)

    def first(self, length: int) -> int:
        """The first bin with so much room."""
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._largest[node] < length
        return node - self._leaves

    def fill(self, place: int, length: int) -> None:
        """Put so much into a bin."""
        node = place + self._leaves
        self._largest[node] = max(self._largest[node] - length, _FULL)
        while node > 1:
            node //= 2
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])
