"""The GEMMs of experts: every expert's matrix times the rows of its own tokens
(``isobit.kernels.triton.dispatch``), in one launch.

    FProp, DGrad   Y[row, n] = sum_k A[row, k] B[expert of row, n, k]
    WGrad          grad[e, n, k] += sum over expert e's rows of A[row, n] B[row, k]

An element is computed as by the dense GEMMs (``gemm``), in the same order along K, so an expert's
output for a token has the bits of a dense call with its matrix alone: DeepGEMM's masked, contiguous
and dense kernels and the Triton kernel here agree (tests/gpu/test_experts.py).  A choice between
them may therefore depend on anything.

DeepGEMM has one grid of blocks a matrix, so experts whose parts are not whole blocks, and BF16
sizes that are not whole tiles, go to Triton, and so does INT8.  It has no grouped WGrad: that is
``isobit.kernels.hopper.linear`` in E4M3, ``int8_backward`` in INT8, and a kernel here in BF16.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper import int8_backward
from isobit.kernels.hopper.gemm import BackEnd, call_deep_gemm, deep_gemm_or_triton, stages
from isobit.kernels.hopper.int8 import transposed_e4m3
from isobit.kernels.hopper.linear import triton_fp8_gemm_tn
from isobit.kernels.operands import LinearWeight, Operand
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows
from isobit.kernels.triton.int8_backward import Unbalanced, balanced_rows
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, E4M3, Int8Rows, num_blocks

_WHOLE = 64  # DeepGEMM's BF16 tiles


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of E experts: E4M3 values [E, N, K] with FP32 scales [E, blocks of N, blocks of
    K], INT8 values with FP32 scales [E, N, 1], or BF16 values without.  Blocks of N begin anew at
    each ``part`` rows.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    part: int

    @classmethod
    def of(cls, weight: LinearWeight, num_experts: int) -> "ExpertMatrices":
        """A published matrix [E N, K], without a copy."""
        matrix = weight.matrix
        values = matrix if isinstance(matrix, torch.Tensor) else matrix.values
        scales = None if isinstance(matrix, torch.Tensor) else matrix.scales
        if scales is not None:
            groups = 1 if isinstance(matrix, Int8Rows) else scales.shape[1]
            scales = scales.view(num_experts, -1, groups)
        parts = weight.site.parts
        return cls(values.view(num_experts, -1, values.shape[1]), scales, parts[0])

    @property
    def is_int8(self) -> bool:
        return self.values.dtype == torch.int8

    @property
    def suits_deep_gemm(self) -> bool:
        """Whether DeepGEMM takes its sizes."""
        _, n, k = self.values.shape
        if self.is_int8:
            return False
        if self.scales is None:
            return n % _WHOLE == 0 and k % _WHOLE == 0
        return self.part == n or self.part % BLOCK == 0


def grouped_gemm_nt(
    a: GroupedRows,
    b: ExpertMatrices,
    dispatch: Dispatch,
    back_end: BackEnd | None = None,
) -> torch.Tensor:
    """A [rows, K] times each expert's B^T -> BF16 [rows, N].  Padding rows are undefined, but zeros
    give zeros, and rows of no expert are zeros.
    """
    num_experts, n, k = b.values.shape
    rows = dispatch.rows
    out = torch.empty((rows, n), dtype=torch.bfloat16, device=a.values.device)
    if (back_end or deep_gemm_or_triton()) == "triton" or not b.suits_deep_gemm:
        _triton_grouped_gemm_nt(a, b, dispatch, out)
        return out
    if not dispatch.is_masked:
        if b.scales is None:
            left, right, name = a.values, b.values, "m_grouped_bf16_gemm_nt_contiguous"
        else:
            assert a.scales is not None
            left, right = (a.values, a.scales[0].t()), (b.values, b.scales)
            name = "m_grouped_fp8_gemm_nt_contiguous"
        call_deep_gemm(name, left, right, out, dispatch.experts)
        return out
    values = a.values.view(num_experts, dispatch.height, k)
    if b.scales is None:
        left, right, name = values, b.values, "m_grouped_bf16_gemm_nt_masked"
    else:
        assert a.scales is not None
        left, right = (values, a.scales.transpose(1, 2)), (b.values, b.scales)
        name = "fp8_m_grouped_gemm_nt_masked"
    grid = out.view(num_experts, dispatch.height, n)
    expected = max(1, dispatch.places.numel() // num_experts)
    call_deep_gemm(name, left, right, grid, dispatch.counts, expected)
    return out


@triton.jit(do_not_specialize=["rows", "a_scale_stride"])
def _grouped_gemm_kernel(
    A, B, A_SCALE, B_SCALE, OUT, EXPERTS, rows, a_scale_stride,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """One program a tile of OUT [rows, N] of one expert and part, walked as in ``gemm``.  Scales
    are of blocks along K where SCALED; INT8 has them a row, behind the product.
    """
    tiles_of_part: tl.constexpr = (PART + BLOCK_N - 1) // BLOCK_N
    tiles_n: tl.constexpr = N // PART * tiles_of_part
    blocks_k: tl.constexpr = (K + 127) // 128
    tiles_m = rows // BLOCK_M
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    tile_m = band * 8 + tl.program_id(0) % (8 * tiles_n) % height
    tile_n = tl.program_id(0) % (8 * tiles_n) // height
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    within = tile_n % tiles_of_part * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_n // tiles_of_part * PART + within
    label = tl.load(EXPERTS + tile_m * BLOCK_M)  # a tile's rows are its expert's first ones, if any
    expert = tl.maximum(label, 0).to(tl.int64)
    b_row = expert * N + tile_n // tiles_of_part * PART + within % PART
    depth = tl.arange(0, 128)
    a_place = A + row[:, None].to(tl.int64) * K + depth[None, :]
    b_place = B + b_row[None, :] * K + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT8 else tl.float32)
    for block in range(0, tl.where(label < 0, 0, blocks_k)):
        if K % 128 == 0:
            a = tl.load(a_place)
            b = tl.load(b_place)
        else:
            a = tl.load(a_place, mask=depth[None, :] < K - block * 128, other=0.0)
            b = tl.load(b_place, mask=depth[:, None] < K - block * 128, other=0.0)
        if INT8:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif SCALED:
            scale = tl.load(A_SCALE + block.to(tl.int64) * a_scale_stride + row) * tl.load(
                B_SCALE + (expert * tiles_n + tile_n) * blocks_k + block
            )
            acc = tl.math.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], acc.shape), acc)
        else:
            acc = tl.dot(a, b, acc)
        a_place += 128
        b_place += 128
    if INT8:
        b_scale = tl.load(B_SCALE + b_row)
        acc = acc.to(tl.float32) * tl.load(A_SCALE + row)[:, None] * b_scale[None, :]
    place = OUT + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(place, acc.to(tl.bfloat16), mask=(within < PART)[None, :])


def _triton_grouped_gemm_nt(
    a: GroupedRows, b: ExpertMatrices, dispatch: Dispatch, out: torch.Tensor
) -> None:
    assert dispatch.experts is not None
    _, n, k = b.values.shape
    is_small = dispatch.places.numel() < BLOCK * b.values.shape[0]
    block_m, warps = (64, 4) if is_small else (128, 8)
    grid = (dispatch.rows // block_m * (n // b.part) * num_blocks(b.part),)
    _grouped_gemm_kernel[grid](
        a.values, b.values, a.scales, b.scales, out, dispatch.experts, dispatch.rows,
        dispatch.height, n, k, b.part, block_m, BLOCK, a.scales is not None, b.is_int8,
        num_warps=warps, num_stages=stages(block_m, a.values.element_size()),
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _transpose_kernel(
    VALUES, SCALES, OUT_VALUES, OUT_SCALES,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a block of one expert and its scale; N rows become COLUMNS, where zeros pad each
    part to whole blocks.  Bytes are handled as integers.
    """
    of_part: tl.constexpr = (PART + 127) // 128
    blocks_n: tl.constexpr = N // PART * of_part
    blocks_k: tl.constexpr = (K + 127) // 128
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    within = block_n % of_part * 128 + tl.arange(0, 128)
    n = block_n // of_part * PART + within
    to = block_n * 128 + tl.arange(0, 128)
    k = block_k * 128 + tl.arange(0, 128)
    place = VALUES + (expert * N + n)[:, None] * K + k[None, :]
    values = tl.load(place, mask=(within < PART)[:, None] & (k < K)[None, :], other=0)
    place = OUT_VALUES + (expert * K + k)[:, None] * COLUMNS + to[None, :]
    tl.store(place, tl.trans(values), mask=(k < K)[:, None] & (to < COLUMNS)[None, :])
    if SCALES is not None:
        scale = tl.load(SCALES + (expert * blocks_n + block_n) * blocks_k + block_k)
        tl.store(OUT_SCALES + (expert * blocks_k + block_k) * blocks_n + block_n, scale)


def transpose_experts(b: ExpertMatrices, site: Site) -> ExpertMatrices:
    """[E, N, K] -> [E, K, N], each part of N in whole blocks; the same numbers and scales, or of
    INT8 what DGrad reads.
    """
    if b.is_int8:
        assert b.scales is not None
        made = transposed_e4m3(b.values, b.scales, b.part, site.scales)
        return ExpertMatrices(*made, b.values.shape[2])
    num_experts, n, k = b.values.shape
    is_quantised = b.scales is not None
    part = b.part if is_quantised else n
    blocks_n, blocks_k = n // part * num_blocks(part), num_blocks(k)
    columns = blocks_n * BLOCK if is_quantised else n
    dtype, word = (E4M3, torch.uint8) if is_quantised else (torch.bfloat16, torch.int16)
    values = torch.empty((num_experts, k, columns), dtype=dtype, device=b.values.device)
    scales = None
    if is_quantised:
        shape = (num_experts, blocks_k, blocks_n)
        scales = torch.empty(shape, dtype=torch.float32, device=b.values.device)
    _transpose_kernel[(blocks_k, blocks_n, num_experts)](
        b.values.view(word), b.scales, values.view(word), scales, n, k, part, columns, num_warps=4
    )
    return ExpertMatrices(values, scales, k)


@triton.jit
def _grouped_wgrad_kernel(
    A, B, GRAD, STARTS, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a tile of one expert's gradient; its rows in ascending order, ROWS at a time."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(0) // (tiles_n * tiles_k)
    within = tl.program_id(0) % (tiles_n * tiles_k)
    n = within % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = within // tiles_n * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.load(STARTS + expert) * 128
    end = tl.load(STARTS + expert + 1) * 128
    row = first.to(tl.int64) + tl.arange(0, ROWS)
    a_place = A + row[None, :] * N + (n % N)[:, None]  # those beyond repeat others, not stored
    b_place = B + row[:, None] * K + (k % K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for _ in range(first, end, ROWS):
        acc = tl.dot(tl.load(a_place), tl.load(b_place), acc)
        a_place += ROWS * N
        b_place += ROWS * K
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = GRAD + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(place, tl.load(place, mask=inside) + acc, mask=inside)


def grouped_gemm_tn(
    dy: Operand, x: Operand, grad: torch.Tensor, site: Site, dispatch: Dispatch
) -> None:
    """grad, FP32 [E N, K], contiguous, += dY^T X of each expert's rows, padded with zeros to whole
    groups of 128: dY [rows, N] and X [rows, K] in BF16, or dY^T and X^T in token groups.
    """
    assert grad.is_contiguous()
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        triton_fp8_gemm_tn(dy, x, grad, dispatch.starts)
        return
    assert isinstance(x, torch.Tensor)
    if site.wgrad_of(len(dispatch.places)) == "int8":
        sides = balanced_rows(Unbalanced.of(dy), x, dispatch)
        int8_backward.wgrad(*sides, grad, dispatch)
        return
    dy = dy.values if isinstance(dy, Unbalanced) else dy
    assert isinstance(dy, torch.Tensor)
    num_experts, n, k = len(dispatch.counts), dy.shape[1], x.shape[1]
    assert grad.shape == (num_experts * n, k)
    grid = (num_experts * num_blocks(n) * num_blocks(k),)
    _grouped_wgrad_kernel[grid](
        dy, x, grad, dispatch.starts, n, k, BLOCK, BLOCK, 64, num_warps=8, num_stages=4
    )
