"""A quantised matrix: E4M3 values and the FP32 scales of their groups.

Granularities of an [R, C] matrix, by the shape of the group that shares a scale:

    1x128      scales [R, C/128]        activations and output gradients, along the contraction
    128x128    scales [R/128, C/128]    weights
    128x1      scales [ceil(R/128), C]  WGrad's operands, along the tokens; the last group may be
               short
"""

from dataclasses import dataclass
from typing import Literal

import torch

from isobit.precision.formats import BLOCK, E4M3

Granularity = Literal["1x128", "128x128", "128x1"]


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """E4M3 values [R, C] with FP32 scales in one of three granularities; a scale of NaN marks a
    block that was not finite.
    """

    values: torch.Tensor
    scales: torch.Tensor
    granularity: Granularity

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        row_groups, column_groups = -(-rows // BLOCK), columns // BLOCK
        expected = {
            "1x128": (rows, column_groups),
            "128x128": (row_groups, column_groups),
            "128x1": (row_groups, columns),
        }
        assert self.scales.shape == expected[self.granularity], (
            self.values.shape,
            self.scales.shape,
            self.granularity,
        )

    @classmethod
    def empty_blocks(cls, rows: int, columns: int, device: torch.device) -> "QuantTensor":
        """Unwritten storage for a weight in 128x128 blocks."""
        scales = torch.empty((rows // BLOCK, columns // BLOCK), dtype=torch.float32, device=device)
        return cls(torch.empty((rows, columns), dtype=E4M3, device=device), scales, "128x128")

    def copy_(self, other: "QuantTensor") -> None:
        """Overwrite in place: whoever holds this tensor sees the new weight."""
        assert self.granularity == other.granularity
        self.values.view(torch.uint8).copy_(other.values.view(torch.uint8))
        self.scales.copy_(other.scales)
