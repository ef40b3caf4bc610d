"""Quantisers to E4M3 and INT8, fused with what makes their input: the bytes of
``isobit.kernels.spec.quantise``.

    quantise_rows        [M, K] BF16            -> values, scales
    quantise_gradient    [M, N] BF16            -> values, scales: dY as DGrad reads it
    rms_norm_quantise    h + x, then RMSNorm    -> new h, values, scales (and the norm if asked for)
    swiglu_quantise      silu(gate) * up        -> values, scales, or of another ``Gate``
    swiglu               silu(gate) * up        -> BF16, for a layer in BF16, likewise

    publish              FP32 master            -> BF16 -> E4M3 in 128x128 blocks or INT8 rows, in
                                               place and in one pass

and ``quantise_int8``, ``rms_norm_int8`` and ``swiglu_int8``, in which one program takes a whole
row, since that has one scale.  The Hadamard transform has a fixed order and a maximum has none, so
the bits depend on no layout.

Inputs are rounded to BF16 first, as on the CPU.  amax is compared by its bits, in which a NaN is
larger than any number, so a group that is not finite is found without a comparison of NaN.  The
cast to E4M3 saturates, so nothing is clamped.  One program with one layout takes a row's sum of
squares, so it depends on that row alone.

Scales are K-group-major, [ceil(K/128), M] with M padded to a multiple of 4, the layout that
DeepGEMM and cuBLASLt read through TMA.  The last group of a row may be short.  Blocks of a weight
begin anew at each part, and a launch takes one run of them
(``isobit.kernels.triton.device_functions``).  A program holds its block or row in registers, so a
weight costs 4 bytes in and 1 byte out, and one more in where changed bytes are counted.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import (
    GELU_CUBIC,
    GELU_STEEP,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Gate,
    HeadWeight,
    LinearWeight,
    Operand,
)
from isobit.kernels.triton.device_functions import padded_size, rotated, rotated_row, runs
from isobit.kernels.triton.e4m3 import rounded
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    AMAX_FLOOR,
    BLOCK,
    DTYPES,
    E4M3,
    E4M3_MAX,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    num_blocks,
    rotation_size,
)

_FLOOR_BITS = 0x21800000
_INF_BITS = tl.constexpr(0x7F800000)
# carries into the exponent exactly when the mantissa is above 0.75
_ROUND_UP_ABOVE_1_75 = tl.constexpr(0x1FFFFF)
assert torch.tensor(AMAX_FLOOR).view(torch.int32).item() == _FLOOR_BITS
FLOOR_BITS = tl.constexpr(_FLOOR_BITS)
MAX = tl.constexpr(E4M3_MAX)


@dataclass(frozen=True, slots=True)
class QuantRows:
    """E4M3 [M, K] in 1x128 groups; FP32 scales [M, ceil(K/128)] with strides (1, padded M)."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "QuantRows":
        """Uninitialised."""
        padded = -(-rows // 4) * 4
        scales = torch.empty((num_blocks(columns), padded), dtype=torch.float32, device=device)
        return cls(torch.empty((rows, columns), dtype=E4M3, device=device), scales.t()[:rows])

    def written(self, as_bytes: bool) -> "QuantRows":
        """The same for a kernel to write; ``as_bytes`` for one that rounds by integers alone."""
        return QuantRows(self.values.view(torch.uint8), self.scales) if as_bytes else self

    def groups(self, first: int, count: int) -> "QuantRows":
        """``count`` whole groups of every row, not copied."""
        columns = slice(first * BLOCK, (first + count) * BLOCK)
        return QuantRows(self.values[:, columns], self.scales[:, first : first + count])


@triton.jit
def larger(a, b):
    """The larger one, or a NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x, AXIS: tl.constexpr):
    """The bits of the largest |x| along an axis of FP32 numbers, as integers; a NaN is largest."""
    return tl.reduce(tl.abs(x), AXIS, larger).to(tl.int32, bitcast=True)


@triton.jit
def to_e4m3(x, amax_bits, POWER_OF_TWO: tl.constexpr, BYTES: tl.constexpr = False):
    """FP32 x and its groups' ``amax_bits``, broadcast to x -> E4M3 x, or its BYTES as integers, and
    FP32 scales like the bits.
    """
    bits = tl.maximum(amax_bits, FLOOR_BITS)
    bad = bits >= _INF_BITS
    if POWER_OF_TWO:
        exponent = ((bits + _ROUND_UP_ABOVE_1_75) >> 23) - 8
        scale = tl.where(bad, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
        y = x * tl.where(bad, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    else:
        scale = tl.where(bad, float("nan"), tl.div_rn(bits.to(tl.float32, bitcast=True), MAX))
        y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return rounded(y) if BYTES else y.to(tl.float8e4nv), scale


@triton.jit
def to_int8(x, amax_bits):
    """FP32 x and its rows' ``amax_bits``, broadcast to x -> INT8 x, FP32 scales like the bits."""
    bits = tl.maximum(amax_bits, FLOOR_BITS)
    bad = bits >= _INF_BITS
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bad, float("nan"), tl.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32)))
    y = tl.where(bad, 0.0, x * tl.div_rn(tl.full(amax.shape, 127.0, tl.float32), amax))
    # 1.5 * 2^23 more is the integer that is nearest to y, in the lowest bits.
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def larger_size(best, x):
    """The larger of ``best`` and |x|, element by element, or a NaN; both FP32."""
    return larger(best, tl.abs(x))


@triton.jit
def store_chunks(
    chunks, behind, VALUES, SCALE, WRITTEN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """A row behind its Hadamard matrix, in chunks FP32 [CHUNK], and the largest sizes of their
    elements, likewise -> INT8 at VALUES, WRITTEN of them, and its scale.
    """
    bits = amax_bits(behind, 0)
    for i in tl.static_range(CHUNKS):
        column = i * CHUNK + tl.arange(0, CHUNK)
        values, scale = to_int8(chunks[i], bits)
        tl.store(VALUES + column, values, mask=column < WRITTEN)
        if i == 0:
            tl.store(SCALE, scale)


@triton.jit
def quantise_groups(
    x, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, LEVELS: tl.constexpr = None,
    BYTES: tl.constexpr = False,
):  # fmt: skip
    """[GROUPS * 128] FP32 -> E4M3 [GROUPS * 128], or its BYTES, and FP32 scales [GROUPS]; or with
    LEVELS, of a whole row, INT8 behind a Hadamard matrix of 2^LEVELS rows, and FP32 [1].
    """
    if LEVELS is None:
        x = tl.reshape(x, [GROUPS, 128])
        values, scales = to_e4m3(x, amax_bits(x, 1)[:, None], POWER_OF_TWO, BYTES)
        scales = tl.reshape(scales, [GROUPS])
    else:
        x = rotated(tl.reshape(x, [1, GROUPS * 128]), 1, GROUPS * 128, LEVELS)
        values, scales = to_int8(x, amax_bits(x, 1)[:, None])
        scales = tl.reshape(scales, [1])
    return tl.reshape(values, [GROUPS * 128]), scales


@triton.jit
def scale_groups(first, GROUPS: tl.constexpr, LEVELS: tl.constexpr):
    """The numbers of the groups whose scales ``quantise_groups`` gives."""
    return first + tl.arange(0, GROUPS if LEVELS is None else 1)


@triton.jit
def _quantise_kernel(
    X, VALUES, SCALES, AMAX, scale_stride, K: tl.constexpr, X_ROW: tl.constexpr, OUT: tl.constexpr,
    OUT_ROW: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of one row: K numbers of the X_ROW in it, to OUT of OUT_ROW.  With
    AMAX, of a whole row, the bits of the largest number go there.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    group = scale_groups(first, GROUPS, LEVELS)
    x = tl.load(X + row * X_ROW + column, mask=column < K, other=0.0).to(tl.float32)
    if AMAX is not None:
        tl.store(AMAX + row, amax_bits(x, 0))
    as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
    values, scales = quantise_groups(x, GROUPS, POWER_OF_TWO, LEVELS, as_bytes)
    tl.store(VALUES + row * OUT_ROW + column, values, mask=column < OUT)
    tl.store(SCALES + group * scale_stride + row, scales, mask=group < (K + 127) // 128)


@triton.jit
def _rms_norm_kernel(
    H, X, WEIGHT, H_OUT, NORM, VALUES, SCALES, scale_stride, epsilon,
    C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
    QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One program a row of C numbers, padded to WIDTH: one layout for every batch."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < C
    h = tl.load(H + row * C + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = tl.load(X + row * C + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (h + x).to(tl.bfloat16)
        tl.store(H_OUT + row * C + column, rounded, mask=inside)
        h = rounded.to(tl.float32)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / C + epsilon)
    y = (h * inverse * weight).to(tl.bfloat16)
    if KEEP:
        tl.store(NORM + row * C + column, y, mask=inside)
    if QUANTISE:
        as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
        values, scales = quantise_groups(
            y.to(tl.float32), WIDTH // 128, POWER_OF_TWO, LEVELS, as_bytes
        )
        group = scale_groups(0, WIDTH // 128, LEVELS)
        tl.store(VALUES + row * C + column, values, mask=inside)
        tl.store(SCALES + group * scale_stride + row, scales, mask=group < (C + 127) // 128)


@triton.jit
def four_sigmoids(x):
    """4 / (1 + exp(-x)) of FP32 x.

    A quarter of the denominator is at least 1/4 and at most 2^126, or infinite: neither it nor its
    reciprocal is subnormal, and an exponential that vanishes next to 1 may be zero.  So the
    approximate instructions suffice, without the dozen others by which the plain expression handles
    such numbers, and give its bits, scaled by the power of two.
    """
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * -1.4426950408889634],
        tl.float32,
        is_pure=True,
        pack=1,
    )
    quarter = tl.fma(power, 0.25, 0.25)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [quarter], tl.float32, is_pure=True, pack=1
    )


_STEEP, _CUBIC = tl.constexpr(GELU_STEEP), tl.constexpr(GELU_CUBIC)
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def exponent(x, GATE: tl.constexpr):
    """s of the gate's function x / (1 + exp(-s)), FP32."""
    if GATE == "gelu_tanh":
        return (x + x * x * x * _CUBIC) * _STEEP
    elif GATE == "clamped_silu":
        return x * _ALPHA
    else:
        return x


@triton.jit
def at_most(x):
    """x, clamped from above as gpt-oss clamps its gate; a NaN stays."""
    return tl.where(x > _LIMIT, _LIMIT, x)


@triton.jit
def clamped_up(up):
    """up + 1, up clamped on both sides."""
    return tl.where(up < -_LIMIT, -_LIMIT, at_most(up)) + 1.0


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """BF16 function of the gate, silu(gate) with GATE "silu", times up."""
    x = gate.to(tl.float32)
    if GATE == "clamped_silu":
        x = at_most(x)
    y = four_sigmoids(exponent(x, GATE)) * (0.25 * x)
    up = up.to(tl.float32)
    if GATE == "clamped_silu":
        up = clamped_up(up)
    return (y * up).to(tl.bfloat16)


@triton.jit
def _swiglu_kernel(GATE_UP, OUT, C: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr):
    """One program WIDTH columns of one row: gate [row, column], up [row, C + column]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < C
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    tl.store(OUT + row * C + column, gated(gate, up, GATE), mask=inside)


@triton.jit
def _gated_row(GATE_UP, KEPT, row, column, inside, C: tl.constexpr, GATE: tl.constexpr):
    """``gated`` of these columns of a row, which is also written to KEPT, if that is
    given: gate [row, column], up [row, C + column].
    """
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    y = gated(gate, up, GATE)
    if KEPT is not None:
        tl.store(KEPT + row * C + column, y, mask=inside)
    return y


@triton.jit
def _swiglu_quantise_kernel(
    GATE_UP, VALUES, SCALES, scale_stride, KEPT, C: tl.constexpr, GROUPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of one row of ``_gated_row``."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    group = first + tl.arange(0, GROUPS)
    inside = column < C
    y = _gated_row(GATE_UP, KEPT, row, column, inside, C, GATE)
    as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
    values, scales = quantise_groups(y.to(tl.float32), GROUPS, POWER_OF_TWO, None, as_bytes)
    tl.store(VALUES + row * C + column, values, mask=inside)
    tl.store(SCALES + group * scale_stride + row, scales, mask=group < (C + 127) // 128)


@triton.jit
def _swiglu_int8_kernel(
    GATE_UP, VALUES, SCALES, KEPT, C: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """``_swiglu_quantise_kernel`` to INT8: one program a row, in CHUNKS chunks."""
    row = tl.program_id(0).to(tl.int64)
    behind = tl.zeros([CHUNK], tl.float32)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        column = i * CHUNK + tl.arange(0, CHUNK)
        inside = column < C
        y = _gated_row(GATE_UP, KEPT, row, column, inside, C, GATE)
        x = rotated_row(y.to(tl.float32), CHUNK, LEVELS)
        behind = larger_size(behind, x)
        chunks = chunks + (x,)  # noqa: RUF005 (Triton unpacks no tuple)
    store_chunks(chunks, behind, VALUES + row * C, SCALES + row, C, CHUNK, CHUNKS)


def quantise_rows(
    x: torch.Tensor, scales: ScaleKind = "power_of_two", as_bytes: bool = False
) -> QuantRows:
    """[M, K] BF16 or FP32, contiguous; ``as_bytes`` by integers alone, for every card."""
    rows, columns = x.shape
    out = QuantRows.empty(rows, columns, x.device)
    _quantise(x, columns, out.written(as_bytes), columns, columns, scales)
    return out


def quantise_gradient(
    dy: torch.Tensor,
    parts: tuple[int, ...],
    scales: ScaleKind = "power_of_two",
    as_bytes: bool = False,
) -> QuantRows:
    """dY [M, N] BF16, contiguous, of a matrix with these ``parts`` -> [M, ``padded_size``]: groups
    begin anew at each part, and zeros pad a short one.
    """
    out = QuantRows.empty(dy.shape[0], padded_size(parts), dy.device)
    for run in runs(parts):
        part = out.groups(run.first_block, run.blocks).written(as_bytes)
        _quantise(dy[:, run.first :], dy.shape[1], part, run.size, run.blocks * BLOCK, scales)
    return out


def _quantise(
    x: torch.Tensor, row: int, out: QuantRows, columns: int, written: int, scales: ScaleKind
) -> None:
    """``columns`` of x, whose rows are ``row`` apart, to ``written`` of out, padded with zeros."""
    groups = _groups_of_program(columns)
    grid = (x.shape[0], triton.cdiv(columns, groups * BLOCK))
    _quantise_kernel[grid](
        x, out.values, out.scales, None, out.scales.stride(1), columns, row, written,
        out.values.stride(0), groups, scales == "power_of_two", None, num_warps=4,
    )  # fmt: skip


def quantise_int8(x: torch.Tensor) -> Int8Rows:
    """[M, K] BF16 or FP32, contiguous -> INT8 behind the Hadamard matrix."""
    rows, columns = x.shape
    out = Int8Rows.empty(rows, columns, x.device)
    quantise_columns(x, columns, columns, out, columns)
    return out


def quantise_columns(
    x: torch.Tensor,
    row: int,
    columns: int,
    out: Int8Rows,
    written: int,
    amax: torch.Tensor | None = None,
) -> None:
    """``columns`` of x, whose rows are ``row`` apart, to ``written`` of out, padded with zeros; the
    bits of the largest number of each row to ``amax``, int32 [M].
    """
    width = width_of_row(columns)
    _quantise_kernel[(len(x),)](
        x, out.values, out.scales, amax, 0, columns, row, written, out.values.stride(0),
        width // BLOCK, False, levels(columns), num_warps=warps_of_row(width),
        enable_fp_fusion=False,
    )  # fmt: skip


def levels(columns: int) -> int:
    """The levels of the Hadamard matrix, of 2^levels rows, for INT8 rows of so many numbers."""
    return rotation_size(columns).bit_length() - 1


def width_of_row(columns: int) -> int:
    """Numbers of a program that takes a whole row, a power of two."""
    return max(BLOCK, 1 << (columns - 1).bit_length())


def warps_of_row(width: int) -> int:
    """Warps of a program that holds so many numbers: at most 64 a thread, up to 32768."""
    return min(16, max(4, width // 2048))


def chunk_of_row(columns: int) -> int:
    """Numbers of a row that a program computes at once, a power of two: in 12,288 columns three
    times 4,096, where a width of 16,384 would compute a quarter more.
    """
    width = width_of_row(columns)
    return width if width <= 4096 else 4096 if 8 * (-columns % 4096) <= columns else 2048


def launch_of_chunks(columns: int) -> dict[str, Any]:
    """Warps of a program that computes a row in chunks and holds it, and the registers of a thread:
    up to 14336 columns two programs share a multiprocessor, of which one loads while the other
    computes.
    """
    width = width_of_row(columns)
    warps = min(16, max(4, width // 1024))
    if width == 16384 and chunk_of_row(columns) == 2048:
        warps = 8  # in 16 a thread would hold too few numbers of a chunk
    fits = warps == 16 and columns <= 12288
    return {"num_warps": warps, "maxnreg": 64 if fits else None}  # neither spills


def _groups_of_program(columns: int) -> int:
    return min(8, 1 << (num_blocks(columns) - 1).bit_length())


def rms_norm_quantise(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scales: ScaleKind | None = "power_of_two",
    keep: bool = False,
    as_bytes: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, QuantRows | None]:
    """Residual h [M, C] and the layer's output x to add to it (or None), both BF16 -> new h,
    RMSNorm(h) if ``keep``, and its quantisation, unless ``scales`` is None.
    """
    out = None if scales is None else QuantRows.empty(*h.shape, h.device)
    to = None if out is None else out.written(as_bytes)
    return *_rms_norm(h, x, weight, epsilon, to, keep, scales == "power_of_two"), out


def rms_norm_int8(
    h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, epsilon: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Int8Rows]:
    """``rms_norm_quantise`` to INT8."""
    out = Int8Rows.empty(*h.shape, h.device)
    return *_rms_norm(h, x, weight, epsilon, out, keep), out


def _rms_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: QuantRows | Int8Rows | None,
    keep: bool,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The new h and, with ``keep``, the norm; its quantisation to ``out``."""
    rows, columns = h.shape
    h_out = h if x is None else torch.empty_like(h)
    norm = torch.empty_like(h) if keep else None
    values, scale = (h, h) if out is None else (out.values, out.scales)
    width = width_of_row(columns)
    _rms_norm_kernel[(rows,)](
        h, h if x is None else x, weight, h_out, h if norm is None else norm, values, scale,
        out.scales.stride(1) if isinstance(out, QuantRows) else 0, epsilon,
        columns, width, x is not None, keep, out is not None, power_of_two,
        levels(columns) if isinstance(out, Int8Rows) else None,
        num_warps=8 if width >= 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return h_out, norm


def swiglu_quantise(
    gate_up: torch.Tensor,
    scales: ScaleKind = "power_of_two",
    kept: torch.Tensor | None = None,
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> QuantRows:
    """[M, 2 C] BF16, gate before up -> the quantisation of silu(gate) * up, [M, C], which itself is
    written to ``kept``, BF16 [M, C], if that is given.
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = QuantRows.empty(rows, columns, gate_up.device)
    groups = _groups_of_program(columns)
    grid = (rows, triton.cdiv(columns, groups * BLOCK))
    _swiglu_quantise_kernel[grid](
        gate_up, out.written(as_bytes).values, out.scales, out.scales.stride(1), kept, columns,
        groups, scales == "power_of_two", gate, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def swiglu_int8(
    gate_up: torch.Tensor, kept: torch.Tensor | None = None, gate: Gate = "silu"
) -> Int8Rows:
    """``swiglu_quantise`` to INT8."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out, chunk = Int8Rows.empty(rows, columns, gate_up.device), chunk_of_row(columns)
    _swiglu_int8_kernel[(rows,)](
        gate_up, out.values, out.scales, kept, columns, chunk, triton.cdiv(columns, chunk),
        levels(columns), gate, **launch_of_chunks(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def swiglu(gate_up: torch.Tensor, gate: Gate = "silu") -> torch.Tensor:
    """[M, 2 C] BF16, gate before up -> silu(gate) * up, [M, C] BF16."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(columns))
    _swiglu_kernel[(rows, triton.cdiv(columns, width))](
        gate_up, out, columns, width, gate, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit
def _differing(a, b):
    """The number of bytes that differ, int32, counted in every fourth element: words of four, each
    of one row.

    Byte by byte, ptxas of CUDA 12.8 compares uninitialised bytes.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; vset4.u32.u32.ne.add $0, $4, $5, $1;",
        "=&r,=&r,=&r,=&r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _publish_kernel(
    MASTER, VALUES, SCALES, CHANGED, K: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """One program a block; ROWS is the number of rows where a block is short, else None."""
    blocks: tl.constexpr = (K + 127) // 128
    block = tl.program_id(0)
    first_row = (block // blocks).to(tl.int64) * 128
    row = first_row + tl.arange(0, 128)
    column = block % blocks * 128 + tl.arange(0, 128)
    place = row[:, None] * K + column[None, :]
    inside = None
    if ROWS is not None:
        inside = (row < ROWS)[:, None] & (column < K)[None, :]
    other = None if inside is None else 0.0
    if CHANGED is not None:
        before = tl.load(VALUES + place, inside, other).to(tl.uint8, bitcast=True)
    x = tl.load(MASTER + place, inside, other).to(tl.bfloat16).to(tl.float32)
    as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
    bits = tl.max(amax_bits(x, 1)[:, None], 0, keep_dims=True)
    values, scale = to_e4m3(x, bits, POWER_OF_TWO, as_bytes)
    if CHANGED is not None:
        differing = _differing(before, values.to(tl.uint8, bitcast=True))
        if inside is not None:  # bytes beyond the matrix are NaN in a block that is not finite
            differing = tl.where(inside, differing, 0)
        tl.store(CHANGED + block, tl.sum(tl.sum(differing, 1), 0))
    tl.store(VALUES + place, values, inside)
    tl.store(SCALES + block + tl.zeros([1, 1], tl.int32), scale)


def publish_blocks(
    master: torch.Tensor,
    out: QuantTensor,
    scales: ScaleKind = "power_of_two",
    changed: torch.Tensor | None = None,
    as_bytes: bool = False,
) -> None:
    """Overwrite ``out`` with the quantisation of master, FP32 [N, K], of its parts; ``as_bytes`` by
    integers alone, for every card.

    ``changed``, int32 like ``out.scales``, receives how many bytes of each block have changed.
    """
    rows, columns = master.shape
    assert out.granularity == "128x128"
    assert out.values.shape == master.shape
    assert master.dtype == torch.float32
    assert all(x.is_contiguous() for x in (master, out.values, out.scales))
    master, blocks = master.detach(), num_blocks(columns)
    values = out.values.view(torch.uint8) if as_bytes else out.values
    for run in runs(out.parts or (rows,)):
        is_whole = not run.size % BLOCK and not columns % BLOCK
        _publish_kernel[(run.blocks * blocks,)](
            master[run.first :], values[run.first :], out.scales[run.first_block :],
            None if changed is None else changed[run.first_block :], columns,
            None if is_whole else run.size, scales == "power_of_two", num_warps=8,
        )  # fmt: skip


@triton.jit
def _publish_rows_kernel(
    MASTER, VALUES, SCALES, CHANGED, K: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """One program a row of K numbers, padded to WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < K
    place = row * K + column
    if CHANGED is not None:
        before = tl.load(VALUES + place, mask=inside, other=0).to(tl.int32)
    x = tl.load(MASTER + place, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    values, scale = quantise_groups(x, WIDTH // 128, False, LEVELS)
    if CHANGED is not None:
        differing = (before != values.to(tl.int32)) & inside
        tl.store(CHANGED + row, tl.sum(differing.to(tl.int32), 0))
    tl.store(VALUES + place, values, mask=inside)
    divided = tl.where(scale == scale, scale * (1.0 / (1 << LEVELS)), scale)  # NaN keeps its bits
    tl.store(SCALES + row + tl.arange(0, 1), divided)


def publish_rows(master: torch.Tensor, out: Int8Rows, changed: torch.Tensor | None = None) -> None:
    """Overwrite ``out`` with the quantisation of master, FP32 or BF16 [N, K].

    ``changed``, int32 [N], receives how many values of each row have changed.
    """
    rows, columns = master.shape
    assert out.values.shape == master.shape
    assert all(x.is_contiguous() for x in (master, out.values, out.scales))
    width = width_of_row(columns)
    _publish_rows_kernel[(rows,)](
        master.detach(), out.values, out.scales, changed, columns, width, levels(columns),
        num_warps=warps_of_row(width), enable_fp_fusion=False,
    )  # fmt: skip


def publish(site: Site, master: torch.Tensor, as_bytes: bool = False) -> Operand:
    """FP32 [N, K] -> 128x128 blocks or INT8 rows of the BF16 rounding, or that rounding; blocks
    ``as_bytes``: see ``publish_blocks``.
    """
    master = master.detach()
    if site.forward == "int8":
        rows = Int8Rows.empty(*master.shape, master.device)
        publish_rows(master, rows)
        return rows
    if site.forward != "e4m3":
        return master.to(DTYPES[site.forward], copy=True)
    made = QuantTensor.empty_blocks(*master.shape, master.device, site.parts)
    publish_blocks(master, made, site.scales, as_bytes=as_bytes)
    return made


def republish(weight: LinearWeight, master: torch.Tensor, as_bytes: bool = False) -> torch.Tensor:
    """Write newer values into the same tensors, blocks ``as_bytes``; -> how many numbers have
    changed, int64.
    """
    master, matrix = master.detach(), weight.matrix
    if isinstance(matrix, Int8Rows):
        changed = torch.empty(len(master), dtype=torch.int32, device=master.device)
        publish_rows(master, matrix, changed)
        return changed.sum()
    if isinstance(matrix, QuantTensor):
        changed = torch.empty(matrix.scales.shape, dtype=torch.int32, device=master.device)
        publish_blocks(master, matrix, weight.site.scales, changed, as_bytes)
        return changed.sum()
    assert isinstance(matrix, torch.Tensor)
    made = master.to(matrix.dtype)
    differing = (made != matrix).sum()
    matrix.copy_(made)
    return differing


def publish_head(site: Site, table: torch.Tensor, held: HeadWeight | None = None) -> HeadWeight:
    """lm_head is used as it is, and its INT8 rows where the site is in INT8."""
    if site.forward != "int8":
        return HeadWeight(table)
    rows = None if held is None else held.int8
    if rows is None:
        rows = Int8Rows.empty(*table.shape, table.device)
    publish_rows(table, rows)
    return HeadWeight(table, rows)
