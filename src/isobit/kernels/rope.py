"""The table of rotary positions, the same bits on every device.

The angles position * frequency are taken in FP64 and their sines and cosines rounded to FP32 once,
into a table with a row a position: `pow` in FP32 is one of the operations whose bits depend on the
place in the tensor.
"""

from dataclasses import dataclass

import torch

_ROWS = 1 << 16
"""Positions whose FP64 angles are in memory at a time."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, FP32 [positions, D/2]; with YaRN both times its attention factor."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(
        cls, inverse_frequencies: torch.Tensor, positions: int, attention_scaling: float = 1.0
    ) -> "RopeTable":
        """From FP64 inverse frequencies [D/2], and what cos and sin are multiplied by."""
        cos, sin = torch.empty(2, positions, len(inverse_frequencies)).unbind()
        for first in range(0, positions, _ROWS):
            places = torch.arange(first, min(first + _ROWS, positions), dtype=torch.float64)
            angles = places[:, None] * inverse_frequencies[None, :]
            cos[first : first + _ROWS] = angles.cos().mul_(attention_scaling)
            sin[first : first + _ROWS] = angles.sin().mul_(attention_scaling)
        return cls(cos, sin)

    def to(self, device: torch.device) -> "RopeTable":
        """The table on a device."""
        return RopeTable(self.cos.to(device), self.sin.to(device))

    def rows(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of the given positions, int64 [T], shaped [T, 1, D/2] to broadcast over
        heads.
        """
        cos, sin = (x.index_select(0, positions)[:, None] for x in (self.cos, self.sin))
        return RopeTable(cos, sin)

    def backward(self) -> "RopeTable":
        """The table of the transposed rotation: it takes a gradient back, and without an attention
        factor the rotation itself.
        """
        return RopeTable(self.cos, -self.sin)
