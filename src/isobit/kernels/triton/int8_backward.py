"""DGrad and WGrad in INT8, with the bits of ``isobit.kernels.spec.int8_backward``.

    quantise_parts     dY              -> INT8 for DGrad, a scale for each token and part, and the
                                          largest |dY| of each, from one read
    transposed_parts   W in INT8       -> W^T for DGrad, a layer at a time, of all its experts
    balanced_rows      dY, X           -> dY^T and X^T for WGrad, a scale a row over all tokens
    dgrad, wgrad       the products of one linear

A scale that covers all tokens, or all of a part's rows, is known only after everything has been
read.  So W^T and WGrad's operands are made in two passes, the first of which leaves the largest
number of each row by ``atomic_max`` of its bits: a maximum has no order.  W^T is made by kernels of
Gluon, without anything that later generations have alone: each of its two Hadamard transforms stays
in a thread, where Triton's own layouts spill.

Parts begin at whole blocks of 128 columns, with zeros behind short ones, and dY^T and X^T have
zeros up to a whole block of tokens.  DGrad is a product for each part, added to those before, which
are FP32 in memory.  The operands of experts have their rows of tokens in whole blocks
(``isobit.kernels.triton.dispatch``), and an expert's columns have scales of their own.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isobit.kernels.operands import Operand
from isobit.kernels.triton.dispatch import Dispatch
from isobit.kernels.triton.int8 import add_product
from isobit.kernels.triton.quantise import (
    FLOOR_BITS,
    amax_bits,
    larger_size,
    levels,
    quantise_columns,
    to_int8,
    width_of_row,
)
from isobit.precision.quant_tensor import BLOCK, Int8Parts, Int8Rows, num_blocks

_STRIP = tl.constexpr(32)  # tokens that a program reads at once, four times before it waits
_FACTORS = tl.constexpr(1024)  # tokens of a program that balances
_ROWS = tl.constexpr(4)  # of a program that looks for their largest numbers
_WIDEST = 1024  # numbers of each that it reads at once, and four times before it waits
_INF_BITS = tl.constexpr(0x7F800000)
_LARGEST_SHIFT = tl.constexpr(126)

_amax_bits = gluon.jit(amax_bits.fn)  # compiled as a part of a Gluon kernel


@dataclass(frozen=True, slots=True)
class Unbalanced:
    """dY as WGrad reads it, before X is there."""

    values: torch.Tensor  # BF16 [T, N]
    scales: torch.Tensor  # int32 [parts, T]: the bits of the largest |dY| of each part

    @classmethod
    def of(cls, dy: Operand) -> "Unbalanced":
        """dY itself, whose largest numbers are not known where DGrad is not in INT8, or this."""
        if isinstance(dy, torch.Tensor):
            return cls(dy, row_amax(dy))
        assert isinstance(dy, cls)
        return dy


@dataclass(frozen=True, slots=True)
class BalancedRows:
    """dY^T or X^T as WGrad reads it."""

    values: torch.Tensor  # INT8 [C, tokens in whole blocks]
    scales: torch.Tensor  # FP32 [C], or [E C], each expert's


def quantise_parts(dy: torch.Tensor, parts: tuple[int, ...]) -> tuple[Int8Parts, torch.Tensor]:
    """dY [T, N] BF16, contiguous -> INT8 [T, whole blocks of all parts], and the bits of the
    largest numbers, int32 [parts, T].
    """
    (tokens, columns), blocks = dy.shape, [num_blocks(part) for part in parts]
    made = torch.empty((tokens, BLOCK * sum(blocks)), dtype=torch.int8, device=dy.device)
    scales = torch.empty((len(parts), tokens), dtype=torch.float32, device=dy.device)
    amax = torch.empty((len(parts), tokens), dtype=torch.int32, device=dy.device)
    first, first_block = 0, 0
    for part, count, scale, largest in zip(parts, blocks, scales, amax, strict=True):
        to = made[:, BLOCK * first_block :]
        quantise_columns(dy[:, first:], columns, part, Int8Rows(to, scale), BLOCK * count, largest)
        first, first_block = first + part, first_block + count
    return Int8Parts(made, scales, parts), amax


@triton.jit(do_not_specialize=["tokens"])
def _row_amax_kernel(X, AMAX, tokens, x_row, C: tl.constexpr, WIDTH: tl.constexpr):
    """One program _ROWS rows of C numbers, WIDTH at a time."""
    token = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    best = tl.zeros([_ROWS, WIDTH], tl.float32)
    for first in tl.range(0, C, WIDTH, loop_unroll_factor=4):
        column = first + tl.arange(0, WIDTH)
        inside = (token < tokens)[:, None]
        if C % WIDTH:
            inside = inside & (column < C)[None, :]
        x = tl.load(X + token[:, None] * x_row + column[None, :], mask=inside, other=0.0)
        best = larger_size(best, x.to(tl.float32))
    tl.store(AMAX + token, amax_bits(best, 1), mask=token < tokens)


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """BF16 [T, C] -> the bits of the largest number of each row, int32 [1, T]; a NaN is largest."""
    rows, columns = x.shape
    made = torch.empty((1, rows), dtype=torch.int32, device=x.device)
    width = min(_WIDEST, width_of_row(columns))
    _row_amax_kernel[(triton.cdiv(rows, _ROWS.value),)](
        x, made, rows, x.stride(0), columns, width, num_warps=4
    )
    return made


@triton.jit(do_not_specialize=["tokens"])
def _balance_kernel(DY_AMAX, X_AMAX, FACTORS, tokens, PARTS: tl.constexpr):
    """One program 1,024 tokens: FACTORS FP32 [2, tokens], of dY and of X."""
    token = tl.program_id(0) * _FACTORS + tl.arange(0, _FACTORS)
    inside = token < tokens
    left = tl.load(DY_AMAX + token, mask=inside, other=0)
    for part in tl.static_range(1, PARTS):
        left = tl.maximum(left, tl.load(DY_AMAX + part * tokens + token, mask=inside, other=0))
    right = tl.load(X_AMAX + token, mask=inside, other=0)
    shift = (((left - right) >> 23) + 1) >> 1
    shift = tl.minimum(tl.maximum(shift, -_LARGEST_SHIFT), _LARGEST_SHIFT)
    finite = (left < _INF_BITS) & (right < _INF_BITS)
    shift = tl.where(finite, shift, 0)
    adds = ~finite | ((left != 0) & (right != 0))
    of_dy = tl.where(adds, (127 - shift) << 23, 0).to(tl.float32, bitcast=True)
    of_x = tl.where(adds, (127 + shift) << 23, 0).to(tl.float32, bitcast=True)
    tl.store(FACTORS + token, of_dy, mask=inside)
    tl.store(FACTORS + tokens + token, of_x, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _column_amax_kernel(X, FACTORS, EXPERTS, AMAX, tokens, C: tl.constexpr, ROW: tl.constexpr):
    """One program 128 of the C columns of 128 tokens, with EXPERTS of one expert's; AMAX int32
    [experts, C], zeros before.
    """
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    first = tl.program_id(1).to(tl.int64) * 128
    expert = 0
    if EXPERTS is not None:
        expert = tl.load(EXPERTS + first)
    best = tl.zeros([_STRIP, 128], tl.float32)
    for strip in tl.range(0, 128, _STRIP, loop_unroll_factor=4):
        token = first + strip + tl.arange(0, _STRIP)
        factor = tl.load(FACTORS + token, mask=token < tokens, other=0.0)
        inside = (token < tokens)[:, None]
        if C % 128:
            inside = inside & (column < C)[None, :]
        x = tl.load(X + token[:, None] * ROW + column[None, :], mask=inside, other=0.0)
        best = larger_size(best, x.to(tl.float32) * factor[:, None])
    bits = tl.max(best.to(tl.int32, bitcast=True), 0)
    tl.atomic_max(AMAX + expert * C + column, bits, mask=(column < C) & (expert >= 0))


@triton.jit(do_not_specialize=["tokens"])
def _columns_kernel(
    X, FACTORS, EXPERTS, AMAX, OUT, OUT_SCALES, tokens, C: tl.constexpr, ROW: tl.constexpr
):
    """One program 128 tokens of 128 columns, to OUT [C, tokens in whole blocks]; OUT_SCALES FP32
    [experts, C].
    """
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    token = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    expert = 0
    if EXPERTS is not None:
        expert = tl.maximum(tl.load(EXPERTS + tl.program_id(1) * 128), 0)
    place = expert * C + column
    factor = tl.load(FACTORS + token, mask=token < tokens, other=0.0)
    inside = (token < tokens)[:, None] & (column < C)[None, :]
    x = tl.load(X + token[:, None] * ROW + column[None, :], mask=inside, other=0.0)
    bits = tl.load(AMAX + place, mask=column < C, other=0)
    made, scale = to_int8(x.to(tl.float32) * factor[:, None], bits[None, :])
    to = OUT + column.to(tl.int64)[:, None] * (tl.num_programs(1) * 128) + token[None, :]
    tl.store(to, tl.trans(made), mask=(column < C)[:, None])
    if EXPERTS is not None or tl.program_id(1) == 0:  # all blocks of an expert store the same
        tl.store(OUT_SCALES + place, tl.max(scale, 0), mask=column < C)


def balanced_rows(
    dy: Unbalanced, x: torch.Tensor, dispatch: Dispatch | None = None
) -> tuple[BalancedRows, BalancedRows]:
    """dY and X [T, K], BF16 -> dY^T [N, Tp] and X^T [K, Tp], Tp = T in whole blocks; of rows that
    are dispatched, with scales [E N] and [E K], undefined for an expert without tokens.
    """
    tokens, parts = len(x), len(dy.scales)
    factors = torch.empty((2, tokens), dtype=torch.float32, device=x.device)
    _balance_kernel[(triton.cdiv(tokens, _FACTORS.value),)](
        dy.scales, row_amax(x), factors, tokens, parts, num_warps=4
    )
    return _columns(dy.values, factors[0], dispatch), _columns(x, factors[1], dispatch)


def _columns(x: torch.Tensor, factors: torch.Tensor, dispatch: Dispatch | None) -> BalancedRows:
    tokens, columns = x.shape
    assert x.stride(1) == 1
    experts, count, blocks = None, 1, num_blocks(tokens)
    if dispatch is not None:
        experts, count = dispatch.experts, len(dispatch.counts)
    amax = torch.zeros(count * columns, dtype=torch.int32, device=x.device)
    _column_amax_kernel[num_blocks(columns), blocks](
        x, factors, experts, amax, tokens, columns, x.stride(0), num_warps=4
    )
    shape = columns, blocks * BLOCK
    made = BalancedRows(
        torch.empty(shape, dtype=torch.int8, device=x.device),
        torch.empty(count * columns, dtype=torch.float32, device=x.device),
    )
    _columns_kernel[num_blocks(columns), blocks](
        x, factors, experts, amax, made.values, made.scales, tokens, columns, x.stride(0),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return made


# Layouts of a block of 128 x 128 over 4 warps: as it is loaded, 16 bytes a thread; a row a thread,
# and a column a thread, in which a Hadamard transform needs no other thread; as it is stored.
LOADED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
A_ROW = gl.constexpr(gl.BlockedLayout([1, 128], [32, 1], [4, 1], [1, 0]))
A_COLUMN = gl.constexpr(gl.BlockedLayout([128, 1], [1, 32], [1, 4], [0, 1]))


@gluon.jit
def _pairs(x, APART: gl.constexpr):
    """FP32 [128, 128], a row a thread: (a, b) -> (a + b, a - b) of numbers of a row APART."""
    a, b = gl.split(x.reshape([128, 64 // APART, 2, APART]).permute([0, 1, 3, 2]))
    return gl.join(a + b, a - b).permute([0, 1, 3, 2]).reshape([128, 128])


@gluon.jit
def _rotated(x, LEVELS: gl.constexpr):
    """FP32 [128, 128], a row a thread -> x H, H of blocks of 2^LEVELS columns."""
    for level in gl.static_range(LEVELS):
        x = _pairs(x, 1 << level)
    return x


@gluon.jit
def _turned(
    VALUES, SCALES, rows, PART: gl.constexpr, K: gl.constexpr, LEVELS: gl.constexpr,
    OVER_ROWS: gl.constexpr,
):  # fmt: skip
    """The program's block of a part [PART, K] of the program's matrix, of so many rows: FP32 [128
    of K, 128 of PART], behind both Hadamard matrices; zeros beyond PART.
    """
    first = gl.program_id(2).to(gl.int64) * rows
    VALUES += first * K
    SCALES += first
    n = gl.program_id(1).to(gl.int64) * 128
    k = gl.program_id(0).to(gl.int64) * 128 + gl.arange(0, 128, gl.SliceLayout(0, LOADED))
    row = n + gl.arange(0, 128, gl.SliceLayout(1, LOADED))
    of_row = n + gl.arange(0, 128, gl.SliceLayout(1, A_ROW))
    inside = None
    if PART % 128 or K % 128:
        inside = (row < PART)[:, None] & (k < K)[None, :]
        values = gl.load(VALUES + row[:, None] * K + k[None, :], mask=inside, other=0)
        scales = gl.load(SCALES + of_row, mask=of_row < PART, other=0.0)
    else:
        values = gl.load(VALUES + row[:, None] * K + k[None, :])
        scales = gl.load(SCALES + of_row)
    values = gl.convert_layout(values, A_ROW)
    x = _rotated(values.to(gl.float32) * scales[:, None], LEVELS)
    x = gl.convert_layout(x, A_COLUMN)
    return gl.convert_layout(_rotated(x.permute([1, 0]), OVER_ROWS), A_ROW)


@gluon.jit
def _turned_amax_kernel(
    VALUES, SCALES, AMAX, rows, PART: gl.constexpr, K: gl.constexpr, LEVELS: gl.constexpr,
    OVER_ROWS: gl.constexpr,
):  # fmt: skip
    """One program a block of a matrix; AMAX int32 [matrices, K], zeros before."""
    x = _turned(VALUES, SCALES, rows, PART, K, LEVELS, OVER_ROWS)
    k = gl.program_id(0) * 128 + gl.arange(0, 128, gl.SliceLayout(1, A_ROW))
    gl.atomic_max(AMAX + gl.program_id(2) * K + k, _amax_bits(x, 1), mask=k < K)


@gluon.jit
def _turned_kernel(
    VALUES, SCALES, AMAX, OUT, OUT_SCALES, rows, out_row, PART: gl.constexpr, K: gl.constexpr,
    LEVELS: gl.constexpr, OVER_ROWS: gl.constexpr,
):  # fmt: skip
    """One program a block of a matrix, to [128 of K, 128] of OUT [matrices, K, out_row]; OUT_SCALES
    FP32 [matrices, K].
    """
    x = _turned(VALUES, SCALES, rows, PART, K, LEVELS, OVER_ROWS)
    first = gl.program_id(2).to(gl.int64) * K
    AMAX += first
    OUT += first * out_row
    OUT_SCALES += first
    k = gl.program_id(0) * 128 + gl.arange(0, 128, gl.SliceLayout(1, A_ROW))
    bits = gl.maximum(gl.load(AMAX + k, mask=k < K, other=0), FLOOR_BITS)
    bad = bits >= _INF_BITS
    amax = bits.to(gl.float32, bitcast=True)
    largest = gl.full([128], 127.0, gl.float32, gl.SliceLayout(1, A_ROW))
    scaled_x = x * gl.where(bad, 0.0, gl.div_rn(largest, amax))[:, None]
    y = gl.where(bad[:, None], 0.0, scaled_x)  # a NaN times 0 is a NaN
    # 1.5 * 2^23 more is the integer that is nearest to y, in the lowest bits.
    made = (y + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8)
    if gl.program_id(1) == 0:
        # The Hadamard matrix over a part's rows is its own inverse times 2^OVER_ROWS.
        scale = gl.where(bad, float("nan"), gl.div_rn(amax, largest)) * (1.0 / (1 << OVER_ROWS))
        gl.store(OUT_SCALES + k, scale, mask=k < K)
    made = gl.convert_layout(made, LOADED)
    row = gl.program_id(0) * 128 + gl.arange(0, 128, gl.SliceLayout(1, LOADED))
    to = gl.program_id(1) * 128 + gl.arange(0, 128, gl.SliceLayout(0, LOADED))
    place = OUT + row.to(gl.int64)[:, None] * out_row + to[None, :]
    gl.store(place, made, mask=(row < K)[:, None])


def transposed_parts(weight: Int8Rows, parts: tuple[int, ...], experts: int = 1) -> Int8Parts:
    """Published matrices [E N, K], each of these parts -> W^T [E K, whole blocks of all parts]."""
    (rows, k), device = weight.values.shape, weight.values.device
    n = sum(parts)
    assert experts * n == rows
    blocks = [num_blocks(part) for part in parts]
    made = torch.empty((experts * k, BLOCK * sum(blocks)), dtype=torch.int8, device=device)
    scales = torch.empty((len(parts), experts * k), dtype=torch.float32, device=device)
    amax = torch.zeros((len(parts), experts * k), dtype=torch.int32, device=device)
    first, first_block = 0, 0
    for index, (part, count) in enumerate(zip(parts, blocks, strict=True)):
        own, grid = weight.rows(first, rows), (num_blocks(k), count, experts)
        over_k, over_rows = levels(k), levels(part)
        _turned_amax_kernel[grid](
            own.values, own.scales, amax[index], n, part, k, over_k, over_rows,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _turned_kernel[grid](
            own.values, own.scales, amax[index], made[:, BLOCK * first_block :], scales[index],
            n, made.stride(0), part, k, over_k, over_rows, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        first, first_block = first + part, first_block + count
    return Int8Parts(made, scales, parts)


def dgrad(dy: Int8Parts, weight: Int8Parts) -> torch.Tensor:
    """dY [T, ..] and W^T [K, ..], of the same parts in whole blocks -> dX BF16 [T, K]."""
    assert dy.parts == weight.parts
    shape, device = (len(dy.values), len(weight.values)), dy.values.device
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if not shape[0]:
        return out
    blocks = [BLOCK * num_blocks(part) for part in dy.parts]
    split = dy.values.split(blocks, 1), weight.values.split(blocks, 1)
    sums: torch.Tensor | None = None
    last = len(blocks) - 1
    for part, (left, right) in enumerate(zip(*split, strict=True)):
        operands = Int8Rows(left, dy.scales[part]), Int8Rows(right, weight.scales[part])
        before = sums
        if part < last and sums is None:
            sums = torch.empty(shape, dtype=torch.float32, device=device)
        to = out if part == last or sums is None else sums
        add_product(*operands, to, before)
    return out


def wgrad(dy: BalancedRows, x: BalancedRows, grad: torch.Tensor) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, from dY^T [N, Tp] and X^T [K, Tp]."""
    assert grad.dtype == torch.float32
    add_product(Int8Rows(dy.values, dy.scales), Int8Rows(x.values, x.scales), grad, grad)
