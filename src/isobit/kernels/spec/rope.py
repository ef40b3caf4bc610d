"""Rotary position embedding: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two halves of
each head, in FP32.  The gradient is the rotation by the negative angle.
"""

import torch

from isobit.kernels.rope import RopeTable


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """x [T, heads, D] -> the same shape in FP32; ``table`` holds the rows of its T positions."""
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * table.cos - x2 * table.sin, x2 * table.cos + x1 * table.sin], -1)
