"""Sums of squares of gradients, one for every 128 rows, in FP64: what the norm of a gradient is
made of, whoever holds which rows.

The order of a sum depends on its own rows alone, so a slice of a tensor at a multiple of 128 rows
gives the sums that it has in the whole.
"""

from collections.abc import Sequence

import torch

from isobit.kernels.spec.norm import row_sum
from isobit.precision.formats import BLOCK

_NUMBERS_AT_A_TIME = 1 << 18


def gradient_squares(grads: Sequence[torch.Tensor]) -> list[float]:
    """FP32 tensors [R, ..] -> the sums of rows 0 .. 127, 128 .. 255, .. of the first, then of the
    next; NaN or infinite where an element is.  A vector's rows are its elements.
    """
    return [one for grad in grads if grad.numel() for one in _of_blocks(grad.view(len(grad), -1))]


def _of_blocks(grad: torch.Tensor) -> list[float]:
    """Of [R, C].  As many rows at a time as a cache holds."""
    rows = BLOCK * max(1, _NUMBERS_AT_A_TIME // (BLOCK * grad.shape[1]))
    made: list[float] = []
    for some in grad.split(rows):
        of_rows = row_sum(some.double().square_()).view(-1)
        padded = torch.nn.functional.pad(of_rows, (0, -len(of_rows) % BLOCK))
        made += padded.view(-1, BLOCK).sum(1).tolist()
    return made
