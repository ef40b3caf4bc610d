"""Which sequences are laid end to end together, within a budget of tokens.

First-fit decreasing: longest first, each into the first bin with room for it.  That fills the bins
(never more than 11/9 of the fewest possible, and one) and puts sequences of similar length side by
side, which is what the attention over a packed batch likes.  Ties keep the order given, so that the
same sequences make the same bins.
"""

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``lengths``, cut into bins whose lengths sum to at most ``budget``, or that hold
    one index.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, left in enumerate(room) if lengths[index] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins
