"""The parts of a fused matrix, as kernels and products take them.

The grid of 128x128 blocks begins anew at each part.  Behind a part of whole blocks it goes on as if
there were no border, so that such parts are taken together with what follows: a *run*.  A model
whose sizes are multiples of 128 has one run a matrix.

DGrad contracts over the rows of a matrix, along which its two operands then share the grid.  Both
are laid out in whole blocks: where a block is short, zeros fill it up, N numbers become
``padded_size``.
"""

from dataclasses import dataclass
from functools import cache

from isobit.precision.formats import BLOCK
from isobit.precision.quant_tensor import num_blocks


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of a matrix whose blocks are all whole, but perhaps the last."""

    first: int
    """Row of the matrix."""
    size: int
    """Rows."""
    first_block: int
    """Of the matrix's blocks."""

    @property
    def blocks(self) -> int:
        """Blocks along the rows."""
        return num_blocks(self.size)


@cache
def runs(parts: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of a matrix with so many rows in each part."""
    made: list[Run] = []
    first = size = first_block = 0
    for part in parts:
        size += part
        if size % BLOCK:
            made.append(Run(first, size, first_block))
            first, size, first_block = first + size, 0, first_block + num_blocks(size)
    return (*made, Run(first, size, first_block)) if size else tuple(made)


def padded_size(parts: tuple[int, ...]) -> int:
    """Rows of a matrix with these parts in whole blocks."""
    return BLOCK * sum(run.blocks for run in runs(parts))
