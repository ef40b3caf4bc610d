"""Quantisation: E4M3 with a scale per group, INT8 behind a Hadamard matrix, the grid of the exact
GEMM, and published weights.

**E4M3.**  Quantising takes FP32 or BF16 and gives the same bytes and scales on every back end:

    scale = max(amax, 2^-60) / 448, rounded up to a power of two or kept in FP32    (per group)
    value = round-to-nearest-even(clamp(x / scale, -448, 448))

The power of two is read off the bits of amax: with amax = m 2^k and 448 = 1.75 2^8, the exponent is
k - 8, plus one where m > 1.75.  Dividing by it is exact.  A group with a NaN or an infinity gets
the scale NaN and the byte 0x7F for every value.  Zeros keep their sign; subnormals of E4M3 (below
2^-6 scale) are rounded to its grid of 2^-9; the largest value is 448 scale.

**Decoding** shifts bits, because torch's own cast is ten times slower on a CPU.  An E4M3 byte
s eeee mmm, moved into the bits s 0eeee mmm0000000 of an FP16, reads as 2^-8 of its value, because
the exponent biases are 7 and 15 (subnormals included).  The NaN bytes 0x7F and 0xFF read as +-480:
a block that was not finite has a NaN scale, and multiplying by the scale restores the NaN.

**INT8** (``isobit.precision.quant_tensor``).  X H is summed in FP32 in the order of the fast
transform: pairs of numbers 1, 2, 4, ..., n / 2 apart, each time (a, b) -> (a + b, a - b).  With
one division a row, one multiplication a number and rounding to nearest even, every back end has the
same bytes and scales.  A row with a NaN or an infinity gets the scale NaN and zeros.

**The grid** gives products of BF16 and FP32 operands one right answer, too.  A block of 128 numbers
of a row is rounded to multiples of 2^(k - 22), where 2^k <= amax < 2^(k+1): integers below 2^23
times one power of two.  A product of two such blocks is a sum of 128 integers below 2^46, at most
2^53, which FP64 holds exactly, in any order, tile or library.  The error is at most 2^-23 of the
block's largest number, and zero for a BF16 number less than 2^15 below it.  Rounding is to nearest
even, by adding and subtracting 1.5 2^52 grid steps in FP64.  NaN and infinity stay.

**Publishing** turns an FP32 master into the matrix that a linear or lm_head multiplies by:

    e4m3         128x128 blocks of the BF16 rounding
    int8         rows of the BF16 rounding times H, the scales divided by n
    bf16, fp32   rows on the grid, of the BF16 rounding or of the master
    lm_head      rows on the grid
"""

import math
from functools import lru_cache
from threading import get_ident

import torch

from isobit.kernels.operands import (
    HeadWeight,
    LinearWeight,
    Operand,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    AMAX_FLOOR,
    BLOCK,
    E4M3,
    E4M3_MAX,
    E4M3_NAN_BYTE,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    INT8_MAX,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    block_sizes,
    rotation_size,
)

_ROUND_UP_ABOVE_1_75 = 0x1FFFFF  # carries into the exponent exactly when the mantissa is above 0.75
_SCALES = torch.tensor(
    [2.0 ** (byte - E8M0_BIAS) for byte in range(E8M0_NAN_BYTE)] + [torch.nan], dtype=torch.float32
)
_RECIPROCALS = torch.tensor(
    [2.0 ** (E8M0_BIAS - byte) for byte in range(E8M0_NAN_BYTE)] + [torch.nan], dtype=torch.float32
)

_INT8_MAX = torch.tensor(INT8_MAX, dtype=torch.float32)


def quantise_rows(
    x: torch.Tensor, scales: ScaleKind = "power_of_two", parts: tuple[int, ...] = ()
) -> QuantTensor:
    """[M, K] -> 1x128 groups: one scale per 128 consecutive numbers of a row.  Used for
    activations, and for output gradients, whose columns are the rows of a weight's ``parts``.
    """
    rows, columns = x.shape
    whole, place = _whole_blocks(x.float(), 1, parts)
    values, scale = _quantise(whole.view(rows, -1, BLOCK), (2,), scales)
    made = _without_padding(values.view(rows, -1), 1, place)
    return QuantTensor(made.view(rows, columns), scale.view(rows, -1), "1x128", parts)


def quantise_blocks(
    x: torch.Tensor, scales: ScaleKind = "power_of_two", parts: tuple[int, ...] = ()
) -> QuantTensor:
    """[N, K] -> 128x128 blocks of a weight, separately for each of the ``parts`` fused along N."""
    whole, row_place = _whole_blocks(x.float(), 0, parts)
    whole, column_place = _whole_blocks(whole, 1, ())
    grid = whole.shape[0] // BLOCK, whole.shape[1] // BLOCK
    blocks = whole.reshape(grid[0], BLOCK, grid[1], BLOCK)
    values, scale = _quantise(blocks, (1, 3), scales)
    made = _without_padding(
        _without_padding(values.view(whole.shape), 1, column_place), 0, row_place
    )
    return QuantTensor(made, scale.view(grid), "128x128", parts)


def quantise_tokens(x: torch.Tensor, scales: ScaleKind = "power_of_two") -> QuantTensor:
    """[T, C] -> groups of 128 tokens of one column, for WGrad's operands; the last group may be
    short.
    """
    tokens, columns = x.shape
    groups = -(-tokens // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, groups * BLOCK - tokens))
    values, scale = _quantise(padded.view(groups, BLOCK, columns), (1,), scales)
    return QuantTensor(
        values.view(groups * BLOCK, columns)[:tokens], scale.view(groups, columns), "128x1"
    )


def quantise_heads(
    x: torch.Tensor, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] -> E4M3 values [..., D] and E8M0 scale bytes [...]: one power-of-two scale per
    vector (Q, K or V of one token and head), or the ``fixed`` byte, uint8 broadcast to [...], where
    that is not 0 and the vector is finite.
    """
    x = x.float()
    byte, finite = _scale_byte(x.abs().amax(-1))
    if fixed is not None:
        byte = byte.where((fixed == 0) | (byte == E8M0_NAN_BYTE), fixed.int())
    return _to_e4m3(x * reciprocal_of_byte(byte)[..., None], byte[..., None], finite), byte.to(
        torch.uint8
    )


_PIECE = 1 << 16
"""Numbers that are transformed at once: they stay in the processor's cache."""


def hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
    """FP32 [..., D] -> H x, for each block of ``size`` numbers, a power of two that divides D."""
    blocks = x.reshape(-1, size)
    rows = max(1, _PIECE // size)
    if len(blocks) <= rows:
        made = torch.empty_like(blocks).copy_(_Butterflies.of(len(blocks), size)(blocks))
        return made.view(x.shape)
    made = torch.empty_like(blocks)
    for source, target in zip(blocks.split(rows), made.split(rows), strict=True):
        target.copy_(_Butterflies.of(len(source), size)(source))
    return made.view(x.shape)


class _Butterflies:
    """The steps of the fast transform of [rows, size], in two buffers that are used again: on a CPU
    fresh tensors and views of them would cost more than the additions.
    """

    def __init__(self, rows: int, size: int, thread: int) -> None:
        del thread  # each has its own buffers
        source, target = torch.empty(2, size, rows, dtype=torch.float32).unbind(0)
        self._transposed = source.t()
        self._steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        width = rows
        while width < rows * size:
            a, b = source.view(-1, 2, width).split(1, 1)
            self._steps.append((a, b, target.view(-1, 2, width)))
            source, target = target, source
            width *= 2
        self._result = source.t()

    @classmethod
    def of(cls, rows: int, size: int) -> "_Butterflies":
        return _butterflies(rows, size, get_ident())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 [rows, size] -> the same shape, valid until the next call."""
        self._transposed.copy_(x)
        for a, b, sums_and_differences in self._steps:
            torch.addcmul(a, b, _SIGNS, out=sums_and_differences)
        return self._result


_SIGNS = torch.tensor([[1.0], [-1.0]], dtype=torch.float32)
_butterflies = lru_cache(maxsize=64)(_Butterflies)


def quantise_int8(x: torch.Tensor) -> Int8Rows:
    """[M, K] -> INT8 behind the Hadamard matrix, a scale a row.  Used for activations."""
    rotated = hadamard(x.float(), rotation_size(x.shape[1]))
    return Int8Rows(*round_to_int8(rotated))


def round_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 [..., D] -> INT8 [..., D] and the FP32 scale of each vector [...]."""
    amax = x.abs().amax(-1).clamp(min=AMAX_FLOOR)
    # A tensor, because torch divides a number by a tensor in two roundings.
    inverse = _INT8_MAX / amax
    values = (x * inverse[..., None]).round_()
    if not _all_finite(amax):
        finite = torch.isfinite(amax)
        values.masked_fill_(~finite[..., None], 0.0)
        amax.masked_fill_(~finite, torch.nan)
    return values.to(torch.int8), amax / INT8_MAX


def dequantise_int8(weight: Int8Rows) -> torch.Tensor:
    """A published weight -> FP32 [N, K], before the Hadamard matrix."""
    wide = weight.values.float().mul_(weight.scales[:, None])
    return hadamard(wide, rotation_size(wide.shape[1]))


def scale_byte(amax: torch.Tensor) -> torch.Tensor:
    """FP32 amax >= 0 -> int32 E8M0 byte of max(amax, 2^-60) / 448 rounded up to a power of two; 255
    where amax is not finite.
    """
    return _scale_byte(amax)[0]


def scale_of_byte(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 byte, uint8 or int32 -> FP32 2^(byte - 127); 255 -> NaN."""
    return _SCALES.index_select(0, byte.to(torch.int32).view(-1)).view(byte.shape)


def reciprocal_of_byte(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 byte, uint8 or int32 -> FP32 2^(127 - byte); 255 -> NaN."""
    return _RECIPROCALS.index_select(0, byte.to(torch.int32).view(-1)).view(byte.shape)


def _whole_blocks(
    x: torch.Tensor, dim: int, parts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x with zeros behind each block along ``dim`` that is not whole, and where its own numbers
    stand then; None where nothing is missing.  A zero changes no group's maximum.
    """
    sizes = block_sizes(parts or (x.shape[dim],))
    if all(size == BLOCK for size in sizes):
        return x, None
    place = torch.cat([torch.arange(BLOCK * i, BLOCK * i + size) for i, size in enumerate(sizes)])
    shape = list(x.shape)
    shape[dim] = len(sizes) * BLOCK
    return x.new_zeros(shape).index_copy_(dim, place, x), place


def _without_padding(values: torch.Tensor, dim: int, place: torch.Tensor | None) -> torch.Tensor:
    """E4M3 values at ``place`` along ``dim``."""
    if place is None:
        return values
    return values.view(torch.uint8).index_select(dim, place).view(E4M3)


def _quantise(
    x: torch.Tensor, dims: tuple[int, ...], kind: ScaleKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 x, with one group along ``dims`` -> E4M3 like x, and the groups' FP32 scales with
    ``dims`` kept as size 1.
    """
    amax = x.abs().amax(dims, keepdim=True)
    byte, finite = _scale_byte(amax)
    if kind == "power_of_two":
        return _to_e4m3(x * reciprocal_of_byte(byte), byte, finite), scale_of_byte(byte)
    scale = (amax.clamp(min=AMAX_FLOOR) / E4M3_MAX).masked_fill_(byte == E8M0_NAN_BYTE, torch.nan)
    return _to_e4m3(x / scale, byte, finite), scale


def _scale_byte(amax: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``scale_byte``, and whether every amax is finite."""
    byte = (amax.clamp(min=AMAX_FLOOR).view(torch.int32) + _ROUND_UP_ABOVE_1_75 >> 23) - 8
    finite = _all_finite(amax)
    return (byte if finite else byte.masked_fill_(~torch.isfinite(amax), E8M0_NAN_BYTE)), finite


def _all_finite(amax: torch.Tensor) -> bool:
    """One reduction, since the maximum keeps a NaN."""
    return not amax.numel() or math.isfinite(float(amax.amax()))


def _to_e4m3(scaled: torch.Tensor, byte: torch.Tensor, finite: bool) -> torch.Tensor:
    """Clamp (torch 2.11 casts overflow to NaN, 2.13 saturates), cast, and mark groups that were not
    finite.
    """
    values = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if not finite:
        values.view(torch.uint8).masked_fill_(byte == E8M0_NAN_BYTE, E4M3_NAN_BYTE)
    return values


SHIFT = 256.0
"""The factor that ``shifted_e4m3`` leaves to the caller, who multiplies by a scale anyway."""


def decode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """E4M3 of any shape -> FP32, exact; NaN bytes read as +-480 (see above)."""
    return shifted_e4m3(values).mul_(SHIFT)


def shifted_e4m3(values: torch.Tensor) -> torch.Tensor:
    """``decode_e4m3`` without the factor of 2^8, which saves one pass over a large tensor."""
    return (
        values.view(torch.int8)
        .to(torch.int16)
        .bitwise_left_shift_(7)
        .bitwise_and_(~0x4000)
        .view(torch.float16)
        .float()
    )


GRID_BITS = 22


def snap_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> the same numbers on the grid of each row's block of 128 (the last may be short),
    in the dtype of x.

    A rounded BF16 is a BF16: coarser rounding never needs more mantissa bits.
    """
    columns = x.shape[-1]
    if columns <= BLOCK:
        return _snap(x)
    whole = columns // BLOCK * BLOCK
    parts = [
        _snap(x[..., :whole].reshape(*x.shape[:-1], whole // BLOCK, BLOCK)).reshape(
            *x.shape[:-1], whole
        )
    ]
    if whole < columns:
        parts.append(_snap(x[..., whole:]))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def largest_exponent(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> int32 [...]: k with 2^k <= amax < 2^(k+1); 128 where the row is not finite, -127
    where it is zero or subnormal.
    """
    return (x.float().abs().amax(-1).view(torch.int32) >> 23) - 127


def _snap(x: torch.Tensor) -> torch.Tensor:
    exponent = largest_exponent(x).to(torch.int64)
    # 1.5 * 2^(52 + exponent - 22), written as its FP64 bits.
    shift = ((exponent + (52 - GRID_BITS + 1023) << 52) | (1 << 51)).view(torch.float64)[..., None]
    return x.double().add_(shift).sub_(shift).to(x.dtype)


_NUMBERS_AT_A_TIME = 1 << 18


def publish(site: Site, master: torch.Tensor) -> Operand:
    """FP32 [N, K] -> the matrix that ``linear`` multiplies by."""
    master = master.detach()
    source = master if site.forward == "fp32" else master.bfloat16()
    if site.forward == "int8":
        return _int8_rows(source)
    if site.forward != "e4m3":
        return _snapped(source)
    return quantise_blocks(source, site.scales, site.parts)


def _int8_rows(source: torch.Tensor) -> Int8Rows:
    made = quantise_int8(source)
    return Int8Rows(made.values, made.scales / rotation_size(source.shape[1]))


def republish(weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
    """Write newer values into the same tensors; returns how many numbers changed, as int64."""
    made = publish(weight.site, master)
    changed = (_numbers(made) != _numbers(weight.matrix)).sum()
    if isinstance(made, Int8Rows):
        assert isinstance(weight.matrix, Int8Rows)
        weight.matrix.copy_(made)
    elif isinstance(made, QuantTensor):
        assert isinstance(weight.matrix, QuantTensor)
        weight.matrix.copy_(made)
    else:
        assert isinstance(made, torch.Tensor)
        assert isinstance(weight.matrix, torch.Tensor)
        weight.matrix.copy_(made)
    return changed


def publish_head(site: Site, table: torch.Tensor, held: HeadWeight | None = None) -> HeadWeight:
    """lm_head [V, C] on the grid of the exact GEMM; or in INT8, and its table as it is."""
    if site.forward == "int8":
        made = HeadWeight(table, _int8_rows(table))
    else:
        made = HeadWeight(_snapped(table))
    if held is None:
        return made
    for mine, new in zip(held.tensors, made.tensors, strict=True):
        if mine is not new:  # the table itself, which INT8 leaves as it is
            mine.copy_(new)
    return held


def _snapped(matrix: torch.Tensor) -> torch.Tensor:
    """``snap_rows``, a few rows at a time: the FP64 temporaries of a whole lm_head would be larger
    than the rest of the model.
    """
    rows = max(1, _NUMBERS_AT_A_TIME // matrix.shape[1])
    made = torch.empty_like(matrix)
    for begin in range(0, len(matrix), rows):
        made[begin : begin + rows] = snap_rows(matrix[begin : begin + rows])
    return made


def _numbers(matrix: Operand) -> torch.Tensor:
    """The values to compare: the bytes of a quantised matrix, without scales, or numbers."""
    return matrix if isinstance(matrix, torch.Tensor) else matrix.values.view(torch.uint8)
