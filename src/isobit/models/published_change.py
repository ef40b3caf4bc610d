"""How much of the quantised weights a publication changed.

    share = numbers that are others now / numbers        over the matrices of all linears: E4M3
                                                         bytes, or BF16 numbers where one stays BF16

A step that moves the masters by much less than their format's spacing changes few of them, and the
function that samples and trains hardly at all.  Scales are not counted.
"""

import torch

from isobit.parallel.world import ALONE, World


class PublishedChange:
    """Counts what one publication changes; the counts stay on the device until ``share`` is asked
    for.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._changed: list[torch.Tensor] = []
        self._numbers = 0

    def add(self, changed: torch.Tensor, numbers: int) -> None:
        """One matrix of so many numbers; ``changed`` is an int64 scalar on its device."""
        self._changed.append(changed)
        self._numbers += numbers

    @property
    def share(self) -> float:
        """From 0 to 1, over the rows of all ranks, which ask together; 0 where nothing was
        published again.
        """
        changed = int(torch.stack(self._changed).sum()) if self._changed else 0
        counts = self._world.messages((changed, self._numbers))
        numbers = sum(one[1] for one in counts)
        return sum(one[0] for one in counts) / numbers if numbers else 0.0
