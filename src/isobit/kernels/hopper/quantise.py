"""Quantisers to E4M3, fused with what makes their input: the bytes of
``isobit.kernels.spec.quantise``.

    quantise_rows        [M, K] BF16            -> values, scales
    quantise_gradient    [M, N] BF16            -> values, scales: dY as DGrad reads it
    rms_norm_quantise    h + x, then RMSNorm    -> new h, values, scales (and the norm if asked for)
    swiglu_quantise      silu(gate) * up        -> values, scales
    swiglu               silu(gate) * up        -> BF16, for a layer in BF16

Inputs are rounded to BF16 first, as on the CPU.  amax is compared by its bits, in which a NaN is
larger than any number, so a group that is not finite is found without a comparison of NaN.  The
cast to E4M3 saturates, so nothing is clamped.  One program with one layout takes a row's sum of
squares, so it depends on that row alone.

Scales are K-group-major, [ceil(K/128), M] with M padded to a multiple of 4, the layout that
DeepGEMM and cuBLASLt read through TMA.  The last group of a row may be short.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.device_functions import padded_size, runs
from isobit.precision.quant_tensor import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX, ScaleKind, num_blocks

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
def to_e4m3(x, amax_bits, POWER_OF_TWO: tl.constexpr):
    """FP32 x and its groups' ``amax_bits``, broadcast to x -> E4M3 x, FP32 scales like the bits."""
    bits = tl.maximum(amax_bits, FLOOR_BITS)
    bad = bits >= _INF_BITS
    if POWER_OF_TWO:
        exponent = ((bits + _ROUND_UP_ABOVE_1_75) >> 23) - 8
        scale = tl.where(bad, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
        y = x * tl.where(bad, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    else:
        scale = tl.where(bad, float("nan"), tl.div_rn(bits.to(tl.float32, bitcast=True), MAX))
        y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return y.to(tl.float8e4nv), scale


@triton.jit
def quantise_groups(x, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """[GROUPS * 128] FP32 -> E4M3 [GROUPS * 128] and FP32 scales [GROUPS]."""
    x = tl.reshape(x, [GROUPS, 128])
    values, scales = to_e4m3(x, amax_bits(x, 1)[:, None], POWER_OF_TWO)
    return tl.reshape(values, [GROUPS * 128]), tl.reshape(scales, [GROUPS])


@triton.jit
def _quantise_kernel(
    X, VALUES, SCALES, scale_stride, K: tl.constexpr, X_ROW: tl.constexpr, OUT: tl.constexpr,
    OUT_ROW: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of one row: K numbers of the X_ROW in it, to OUT of OUT_ROW."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    group = first + tl.arange(0, GROUPS)
    x = tl.load(X + row * X_ROW + column, mask=column < K, other=0.0).to(tl.float32)
    values, scales = quantise_groups(x, GROUPS, POWER_OF_TWO)
    tl.store(VALUES + row * OUT_ROW + column, values, mask=column < OUT)
    tl.store(SCALES + group * scale_stride + row, scales, mask=group < (K + 127) // 128)


@triton.jit
def _rms_norm_kernel(
    H, X, WEIGHT, H_OUT, NORM, VALUES, SCALES, scale_stride, epsilon,
    C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
    QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
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
        values, scales = quantise_groups(y.to(tl.float32), WIDTH // 128, POWER_OF_TWO)
        group = tl.arange(0, WIDTH // 128)
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


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), FP32."""
    return four_sigmoids(x) * (0.25 * x)


@triton.jit
def gated(gate, up):
    """BF16 silu(gate) * up."""
    return (silu(gate.to(tl.float32)) * up.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _swiglu_kernel(GATE_UP, OUT, C: tl.constexpr, WIDTH: tl.constexpr):
    """One program WIDTH columns of one row: gate [row, column], up [row, C + column]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < C
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    tl.store(OUT + row * C + column, gated(gate, up), mask=inside)


@triton.jit
def _swiglu_quantise_kernel(
    GATE_UP, VALUES, SCALES, scale_stride, C: tl.constexpr, GROUPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of one row: gate [row, column], up [row, C + column]."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    group = first + tl.arange(0, GROUPS)
    inside = column < C
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    values, scales = quantise_groups(gated(gate, up).to(tl.float32), GROUPS, POWER_OF_TWO)
    tl.store(VALUES + row * C + column, values, mask=inside)
    tl.store(SCALES + group * scale_stride + row, scales, mask=group < (C + 127) // 128)


def quantise_rows(x: torch.Tensor, scales: ScaleKind = "power_of_two") -> QuantRows:
    """[M, K] BF16 or FP32, contiguous."""
    rows, columns = x.shape
    out = QuantRows.empty(rows, columns, x.device)
    _quantise(x, columns, out, columns, columns, scales)
    return out


def quantise_gradient(
    dy: torch.Tensor, parts: tuple[int, ...], scales: ScaleKind = "power_of_two"
) -> QuantRows:
    """dY [M, N] BF16, contiguous, of a matrix with these ``parts`` -> [M, ``padded_size``]: groups
    begin anew at each part, and zeros pad a short one.
    """
    out = QuantRows.empty(dy.shape[0], padded_size(parts), dy.device)
    for run in runs(parts):
        part = out.groups(run.first_block, run.blocks)
        _quantise(dy[:, run.first :], dy.shape[1], part, run.size, run.blocks * BLOCK, scales)
    return out


def _quantise(
    x: torch.Tensor, row: int, out: QuantRows, columns: int, written: int, scales: ScaleKind
) -> None:
    """``columns`` of x, whose rows are ``row`` apart, to ``written`` of out, padded with zeros."""
    groups = _groups_of_program(columns)
    grid = (x.shape[0], triton.cdiv(columns, groups * BLOCK))
    _quantise_kernel[grid](
        x, out.values, out.scales, out.scales.stride(1), columns, row, written,
        out.values.stride(0), groups, scales == "power_of_two", num_warps=4,
    )  # fmt: skip


def _groups_of_program(columns: int) -> int:
    return min(8, 1 << (num_blocks(columns) - 1).bit_length())


def rms_norm_quantise(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scales: ScaleKind | None = "power_of_two",
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, QuantRows | None]:
    """Residual h [M, C] and the layer's output x to add to it (or None), both BF16 -> new h,
    RMSNorm(h) if ``keep``, and its quantisation, unless ``scales`` is None.
    """
    rows, columns = h.shape
    h_out = h if x is None else torch.empty_like(h)
    norm = torch.empty_like(h) if keep else None
    out = None if scales is None else QuantRows.empty(rows, columns, h.device)
    values, scale, stride = (
        (h, h, 0) if out is None else (out.values, out.scales, out.scales.stride(1))
    )
    width = max(BLOCK, triton.next_power_of_2(columns))
    _rms_norm_kernel[(rows,)](
        h, h if x is None else x, weight, h_out, h if norm is None else norm, values, scale, stride,
        epsilon,
        columns, width, x is not None, keep, out is not None, scales == "power_of_two",
        num_warps=8 if width >= 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return h_out, norm, out


def swiglu_quantise(gate_up: torch.Tensor, scales: ScaleKind = "power_of_two") -> QuantRows:
    """[M, 2 C] BF16, gate before up -> the quantisation of silu(gate) * up, [M, C]."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = QuantRows.empty(rows, columns, gate_up.device)
    groups = _groups_of_program(columns)
    grid = (rows, triton.cdiv(columns, groups * BLOCK))
    _swiglu_quantise_kernel[grid](
        gate_up, out.values, out.scales, out.scales.stride(1), columns, groups,
        scales == "power_of_two", num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[M, 2 C] BF16, gate before up -> silu(gate) * up, [M, C] BF16."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(columns))
    _swiglu_kernel[(rows, triton.cdiv(columns, width))](
        gate_up, out, columns, width, num_warps=4, enable_fp_fusion=False
    )
    return out
