"""Quantised matrices, E4M3 or INT8 values with the FP32 scales of their groups, and the constants
that all quantisers share.

**E4M3.** Granularities of an [R, C] matrix, by the shape of the group that shares a scale; with
b(n) = ceil(n / 128), since the last group of a row, column or matrix may be short:

    1x128      scales [R, b(C)]       activations and output gradients, along the contraction
    128x128    scales [b(R), b(C)]    weights
    128x1      scales [b(R), C]       WGrad's operands, along the tokens

A matrix fused of several along its rows has ``parts``, the rows of each: blocks begin anew at each
part, so b(R) is the sum over the parts. The same holds for the columns of an output's gradient.

E4M3 has 4 exponent and 3 mantissa bits, a largest value of 448, no infinity, and one NaN (byte
0x7F, or 0xFF with the sign). value = code * scale, with

    scale = max(amax, 2^-60) / 448       as FP32, or rounded up to a power of two (the default)

The floor on amax keeps gradients of 1e-12 and gives a block of zeros a scale. A block with a NaN or
an infinity gets a NaN scale (E8M0 byte 0xFF) and the value byte 0x7F everywhere, so that no kernel
can make it finite again.

**INT8.** A matrix [R, C] is multiplied along its rows by blocks of a Hadamard matrix H, which
spreads what stands out over a block, and has one FP32 scale a row. H has ``rotation_size(C)`` = n
rows of +1 and -1, and H H = n. With amax the largest number of a row of X H, at least 2^-60:

    value = round-to-nearest-even((X H) * (127 / amax))        -127 .. 127
    scale = amax / 127                                         of a weight, divided by n

Integer sums are exact, so X W^T = (values_x values_w^T) * scale_x * scale_w has one right answer.
A row that was not finite has a NaN scale. What the backward contracts over is another dimension:
``isobit.kernels.spec.int8_backward`` says how its operands are scaled.

**Figures** (``measure_published``). With x a matrix of a checkpoint and q the numbers that its E4M3
bytes stand for, both [N, K]:

    error           sqrt(sum (q - x)^2 / sum x^2), over the matrix
    worst block     the highest error of a block of 128x128
    saturated       share of the bytes that are the largest value, 448: at least one a block where
                    scales are FP32, fewer where they are powers of two, rounded up
    flushed         share of x that are not 0 and whose bytes are
    scales          the smallest and the largest

Error and flushed numbers of a matrix that is stored in E4M3 are not known. Of a matrix in INT8,
which is multiplied by a Hadamard matrix H before, q are the numbers behind H and its inverse, and

    worst block     the highest error of a row
    saturated       share of the values that are 127 or -127: at least one a row
    flushed         share of the numbers of x H that are not 0 and whose values are
    crest           the highest of a row of x H: its largest number over its root mean square
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, reduce
from itertools import accumulate
from operator import add
from typing import Any, Literal

import torch

Format = Literal["e4m3", "int8", "bf16", "fp32"]
EIGHT_BITS: frozenset[Format] = frozenset({"e4m3", "int8"})
ScaleKind = Literal["power_of_two", "fp32"]
Side = Literal["rollout", "training"]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN_BYTE = 0x7F
E8M0_NAN_BYTE = 0xFF
E8M0_BIAS = 127
AMAX_FLOOR = 2.0**-60
BLOCK = 128

INT8_MAX = 127.0
INT8_SUMMANDS = (2**31 - 1) // 127**2
"""Products of two numbers of INT8 whose sum an INT32 always holds: 133,144."""

DTYPES: dict[Format, torch.dtype] = {
    "e4m3": E4M3,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


Granularity = Literal["1x128", "128x128", "128x1"]


def num_blocks(size: int) -> int:
    """Groups of 128 in ``size`` elements."""
    return -(-size // BLOCK)


@cache
def block_sizes(parts: tuple[int, ...]) -> tuple[int, ...]:
    """The number of elements of each block, for parts of these sizes."""
    return tuple(min(BLOCK, part - first) for part in parts for first in range(0, part, BLOCK))


@cache
def block_numbers(parts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The block of each element, int64 [sum of parts], for parts of these sizes."""
    sizes = torch.tensor(block_sizes(parts), device=device)
    return torch.arange(len(sizes), device=device).repeat_interleave(sizes)


def parts_of_rows(parts: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """What rows ``first`` .. ``last`` - 1 of a matrix have of each of its parts, without zeros."""
    made, begin = list[int](), 0
    for part in parts:
        made.append(min(begin + part, last) - max(begin, first))
        begin += part
    return tuple(size for size in made if size > 0)


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """E4M3 values [R, C] with FP32 scales; a NaN scale marks a block that was not finite."""

    values: torch.Tensor
    scales: torch.Tensor
    granularity: Granularity
    parts: tuple[int, ...] = ()
    """Sizes of the parts: of rows of 128x128 blocks, or of columns of 1x128 groups; empty for one
    part.
    """

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        fused = rows if self.granularity == "128x128" else columns
        assert sum(self.parts or (fused,)) == fused, (self.values.shape, self.parts)
        fused_blocks = sum(num_blocks(part) for part in self.parts or (fused,))
        expected = {
            "1x128": (rows, fused_blocks),
            "128x128": (fused_blocks, num_blocks(columns)),
            "128x1": (num_blocks(rows), columns),
        }
        assert self.scales.shape == expected[self.granularity], (
            self.values.shape,
            self.scales.shape,
            self.granularity,
            self.parts,
        )

    @classmethod
    def empty_blocks(
        cls, rows: int, columns: int, device: torch.device, parts: tuple[int, ...] = ()
    ) -> "QuantTensor":
        """Uninitialised storage for a weight in 128x128 blocks."""
        grid = (sum(num_blocks(part) for part in parts or (rows,)), num_blocks(columns))
        scales = torch.empty(grid, dtype=torch.float32, device=device)
        values = torch.empty((rows, columns), dtype=E4M3, device=device)
        return cls(values, scales, "128x128", parts)

    def rows(self, first: int, last: int) -> "QuantTensor":
        """Rows ``first`` .. ``last`` - 1 of a weight, not copied: whole blocks of their parts."""
        assert self.granularity == "128x128", self.granularity
        sizes = block_sizes(self.parts or (self.values.shape[0],))
        bounds = [0, *accumulate(sizes)]
        assert {first, last} <= set(bounds), (first, last, self.parts)
        blocks = slice(bounds.index(first), bounds.index(last))
        parts = parts_of_rows(self.parts, first, last)
        return QuantTensor(self.values[first:last], self.scales[blocks], "128x128", parts)

    def scales_above(self, rows: Sequence[int]) -> list[int]:
        """How many rows of scales belong to the rows of a weight above each of these, which are
        boundaries of blocks.
        """
        sizes = block_sizes(self.parts or (self.values.shape[0],))
        above = dict(zip(accumulate(sizes, initial=0), range(len(sizes) + 1), strict=True))
        return [above[row] for row in rows]

    def row_scales(self) -> torch.Tensor:
        """The scales of 128x128 blocks, repeated for each row: a new FP32 [R, b(C)]."""
        assert self.granularity == "128x128", self.granularity
        parts = self.parts or (self.values.shape[0],)
        return self.scales.index_select(0, block_numbers(parts, self.scales.device))

    def copy_(self, other: "QuantTensor") -> None:
        """Overwrite in place, for all holders of this tensor."""
        assert (self.granularity, self.parts) == (other.granularity, other.parts)
        self.values.view(torch.uint8).copy_(other.values.view(torch.uint8))
        self.scales.copy_(other.scales)


def rotation_size(columns: int) -> int:
    """Rows of the Hadamard matrix by which INT8 matrices of so many columns are multiplied: the
    largest power of two up to 128 that divides them.
    """
    return min(BLOCK, columns & -columns)


def hadamard_matrix(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, FP32 [size, size] of +1 and -1, of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """INT8 values [R, C] of a matrix times H, and the FP32 scale [R] of each row."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.int8, self.values.dtype
        assert self.scales.shape == self.values.shape[:1], (self.values.shape, self.scales.shape)

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Int8Rows":
        """Uninitialised."""
        values = torch.empty((rows, columns), dtype=torch.int8, device=device)
        return cls(values, torch.empty(rows, dtype=torch.float32, device=device))

    def rows(self, first: int, last: int) -> "Int8Rows":
        """Rows ``first`` .. ``last`` - 1, not copied."""
        return Int8Rows(self.values[first:last], self.scales[first:last])

    def scales_above(self, rows: Sequence[int]) -> list[int]:
        """How many scales belong to the rows above each of these."""
        return list(rows)

    def copy_(self, other: "Int8Rows") -> None:
        """Overwrite in place, for all holders of this matrix."""
        self.values.copy_(other.values)
        self.scales.copy_(other.scales)


@dataclass(frozen=True, slots=True)
class Int8Parts:
    """An operand of DGrad: INT8 values [R, C], whose columns are parts of these sizes, and the FP32
    scale [parts, R] of each row and part.  A back end may lay parts out in whole blocks.
    """

    values: torch.Tensor
    scales: torch.Tensor
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.int8, self.values.dtype
        expected = len(self.parts), len(self.values)
        assert self.scales.shape == expected, (self.scales.shape, expected)


QuantisedWeight = QuantTensor | Int8Rows
"""A linear's published matrix in 8 bits."""


def dequantise(matrix: QuantTensor) -> torch.Tensor:
    """A weight in 128x128 blocks -> FP32 [R, C]. The product of E4M3 and an FP32 scale is rounded
    once; with a power of two it is exact, and exact in BF16.
    """
    columns = block_numbers((matrix.values.shape[1],), matrix.scales.device)
    return matrix.values.float().mul_(matrix.row_scales().index_select(1, columns))


@dataclass(frozen=True, slots=True)
class EightBitFigures:
    """The figures of a matrix, or of several."""

    numbers: int
    saturated_numbers: int
    smallest_scale: float
    largest_scale: float
    flushed_numbers: int | None = None
    """None, like the next three, for matrices that were stored in E4M3."""
    squares: float | None = None
    """Sum of x^2."""
    squared_errors: float | None = None
    worst_block: float | None = None
    crest: float | None = None
    """None for E4M3."""

    @property
    def error(self) -> float | None:
        if self.squares is None or self.squared_errors is None:
            return None
        return (self.squared_errors / self.squares) ** 0.5 if self.squares else 0.0

    @property
    def snr(self) -> float | None:
        """The ratio of signal to noise in decibels; None where there is no noise or it is not
        known.
        """
        return -20 * math.log10(self.error) if self.error else None

    @property
    def saturated(self) -> float:
        return self.saturated_numbers / self.numbers

    @property
    def flushed(self) -> float | None:
        return None if self.flushed_numbers is None else self.flushed_numbers / self.numbers

    def __add__(self, other: "EightBitFigures") -> "EightBitFigures":
        def both(take: Callable[[Any, Any], Any], name: str) -> Any:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else take(a, b)

        takes = {"smallest_scale": min, "largest_scale": max, "worst_block": max, "crest": max}
        return EightBitFigures(*(both(takes.get(one.name, add), one.name) for one in fields(self)))

    def as_json(self) -> dict[str, Any]:
        """The figures; None where they are not known."""
        return {
            "error": self.error,
            "snr_db": self.snr,
            "worst_block": self.worst_block,
            "crest": self.crest,
            "saturated": self.saturated,
            "flushed": self.flushed,
            "scales": [self.smallest_scale, self.largest_scale],
        }


def together(figures: list[EightBitFigures]) -> EightBitFigures:
    return reduce(EightBitFigures.__add__, figures)


def measure_published(x: torch.Tensor, published: QuantisedWeight) -> EightBitFigures:
    """The figures of ``x`` [N, K] of the checkpoint, as it is published."""
    if isinstance(published, Int8Rows):
        return _measure_int8(x.float(), published)
    return _measure_e4m3(x.float(), published)


def _measure_int8(x: torch.Tensor, published: Int8Rows) -> EightBitFigures:
    """Measure the error behind H, which multiplies every error and every number's square by n on
    average.
    """
    size = rotation_size(x.shape[1])
    turned = (x.view(-1, size) @ hadamard_matrix(size)).view(x.shape)
    read = published.values.float().mul_(size * published.scales[:, None])
    errors = read.sub_(turned).square_().sum(1, dtype=torch.float64) / size
    squares = x.square().sum(1, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    largest = turned.abs().amax(1).double()
    crests = largest / (squares * size / x.shape[1]).clamp(min=tiny).sqrt()
    return EightBitFigures(
        x.numel(),
        int((published.values.abs() == 127).sum()),
        float(published.scales.min()),
        float(published.scales.max()),
        int(((published.values == 0) & (turned != 0)).sum()),
        float(squares.sum()),
        float(errors.sum()),
        float((errors / squares.clamp(min=tiny)).max().sqrt()),
        float(crests.max()),
    )


def _measure_e4m3(x: torch.Tensor, published: QuantTensor) -> EightBitFigures:
    error = dequantise(published).sub_(x).square_()
    errors, squares = _block_sums(error), _block_sums(x.square())
    shares = errors / squares.clamp(min=torch.finfo(torch.float64).tiny)
    return replace(
        measure_stored(published),
        flushed_numbers=int(((_magnitudes(published) == 0) & (x != 0)).sum()),
        squares=float(squares.sum()),
        squared_errors=float(errors.sum()),
        worst_block=float(shares.max().sqrt()),
    )


def measure_stored(matrix: QuantTensor) -> EightBitFigures:
    """The figures of a matrix that is stored in E4M3."""
    return EightBitFigures(
        matrix.values.numel(),
        int((_magnitudes(matrix) == 0x7E).sum()),  # 448
        float(matrix.scales.min()),
        float(matrix.scales.max()),
    )


def _magnitudes(matrix: QuantTensor) -> torch.Tensor:
    """The bytes without their signs."""
    return matrix.values.view(torch.uint8) & 0x7F


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    """FP32 [N, K], not negative -> FP64 [ceil(N/128), ceil(K/128)]; rows are added in FP32."""
    rows, columns = x.shape
    grid = num_blocks(rows), num_blocks(columns)
    missing = (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows)
    padded = torch.nn.functional.pad(x, missing) if any(missing) else x
    return padded.view(grid[0], BLOCK, grid[1], BLOCK).sum(3).sum(1, dtype=torch.float64)
