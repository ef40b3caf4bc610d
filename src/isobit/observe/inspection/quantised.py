"""What E4M3 does to a matrix of a checkpoint, from one look at it.

x are the checkpoint's numbers, q those that their bytes stand for, both [N, K]:

    error           sqrt(sum (q - x)^2 / sum x^2), over the matrix
    worst block     the same over each block of 128x128, the highest
    saturated       share of the bytes that are the largest value, 448: at least one a block where
                    scales are FP32, fewer where they are powers of two, rounded up
    flushed         share of x that are not 0 and whose bytes are
    scales          the smallest and the largest

A matrix that lies there in E4M3 is what it is: its error against what it was made from cannot be
known, and its flushed numbers not be told from zeros.  Sums of several matrices give the figures of
a layer.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from isobit.precision.dequantise import dequantise
from isobit.precision.formats import BLOCK
from isobit.precision.quant_tensor import QuantTensor, num_blocks

_LARGEST_BYTE = 0x7E
_MAGNITUDE = 0x7F


@dataclass(frozen=True, slots=True)
class Fp8Figures:
    """Of one matrix, or of several together."""

    numbers: int
    saturated_numbers: int
    smallest_scale: float
    largest_scale: float
    flushed_numbers: int | None = None
    """None, as the next three, of bytes that lay there."""
    squares: float | None = None
    """Sum of x^2."""
    squared_errors: float | None = None
    worst_block: float | None = None

    @property
    def error(self) -> float | None:
        """See above."""
        if self.squares is None or self.squared_errors is None:
            return None
        return _relative(self.squared_errors, self.squares)

    @property
    def saturated(self) -> float:
        """See above."""
        return self.saturated_numbers / self.numbers

    @property
    def flushed(self) -> float | None:
        """See above."""
        return None if self.flushed_numbers is None else self.flushed_numbers / self.numbers

    def __add__(self, other: "Fp8Figures") -> "Fp8Figures":
        """Of both together."""
        return Fp8Figures(
            self.numbers + other.numbers,
            self.saturated_numbers + other.saturated_numbers,
            min(self.smallest_scale, other.smallest_scale),
            max(self.largest_scale, other.largest_scale),
            _sum(self.flushed_numbers, other.flushed_numbers),
            _sum(self.squares, other.squares),
            _sum(self.squared_errors, other.squared_errors),
            None
            if self.worst_block is None or other.worst_block is None
            else max(self.worst_block, other.worst_block),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures; None where they cannot be known."""
        return {
            "error": self.error,
            "worst_block": self.worst_block,
            "saturated": self.saturated,
            "flushed": self.flushed,
            "scales": [self.smallest_scale, self.largest_scale],
        }


def together(figures: list[Fp8Figures]) -> Fp8Figures:
    """Of all; there is at least one."""
    return reduce(Fp8Figures.__add__, figures)


def measure_published(x: torch.Tensor, published: QuantTensor) -> Fp8Figures:
    """``x`` [N, K] as the checkpoint has it, and as it is published."""
    x = x.float()
    bare = measure_stored(published)
    magnitudes = published.values.view(torch.uint8) & _MAGNITUDE
    error = dequantise(published).sub_(x).square_()
    errors, squares = _block_sums(error), _block_sums(x.square())
    shares = errors / squares.clamp(min=torch.finfo(torch.float64).tiny)
    return Fp8Figures(
        bare.numbers,
        bare.saturated_numbers,
        bare.smallest_scale,
        bare.largest_scale,
        flushed_numbers=int(((magnitudes == 0) & (x != 0)).sum()),
        squares=float(squares.sum()),
        squared_errors=float(errors.sum()),
        worst_block=float(shares.max().sqrt()),
    )


def measure_stored(matrix: QuantTensor) -> Fp8Figures:
    """A matrix of whose origin nothing is known."""
    magnitudes = matrix.values.view(torch.uint8) & _MAGNITUDE
    return Fp8Figures(
        matrix.values.numel(),
        int((magnitudes == _LARGEST_BYTE).sum()),
        float(matrix.scales.min()),
        float(matrix.scales.max()),
    )


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    """FP32 [N, K], not negative -> FP64 [ceil(N/128), ceil(K/128)]; 128 of a row are added in
    FP32.
    """
    rows, columns = x.shape
    grid = num_blocks(rows), num_blocks(columns)
    missing = (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows)
    padded = torch.nn.functional.pad(x, missing) if any(missing) else x
    return padded.view(grid[0], BLOCK, grid[1], BLOCK).sum(3).sum(1, dtype=torch.float64)


def _relative(errors: float, squares: float) -> float:
    return (errors / squares) ** 0.5 if squares else 0.0


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b
