"""Rotary position embedding: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two halves of
each head, in FP32.

The angles position * frequency are taken in FP64 and their sines and cosines rounded to FP32 once,
into a table with a row a position: `pow` in FP32 is one of the operations whose bits depend on the
place in the tensor. The gradient is the rotation by the negative angle.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, FP32 [positions, D/2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, inverse_frequencies: torch.Tensor, positions: int) -> "RopeTable":
        """From FP64 inverse frequencies [D/2]."""
        angles = (
            torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies[None, :]
        )
        return cls(angles.cos().float(), angles.sin().float())

    def to(self, device: torch.device) -> "RopeTable":
        """The table on a device."""
        return RopeTable(self.cos.to(device), self.sin.to(device))

    def rows(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of the given positions, int64 [T], shaped [T, 1, D/2] to broadcast over
        heads.
        """
        return RopeTable(
            self.cos.index_select(0, positions)[:, None],
            self.sin.index_select(0, positions)[:, None],
        )


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """x [T, heads, D] -> the same shape and dtype; ``table`` holds the rows of its T positions."""
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * table.cos - x2 * table.sin, x2 * table.cos + x1 * table.sin], -1).to(
        x.dtype
    )


def rope(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """``rotate``, differentiable in x."""
    return _Rope.apply(x, table) if torch.is_grad_enabled() else rotate(x, table)  # pyright: ignore[reportReturnType]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: RopeTable) -> torch.Tensor:
        ctx.table = table
        return rotate(x, table)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return rotate(gradients[0], RopeTable(ctx.table.cos, -ctx.table.sin)), None
