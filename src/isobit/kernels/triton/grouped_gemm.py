"""FProp and DGrad of experts on every card: each expert's matrix times the rows of its own tokens
(``isobit.kernels.triton.dispatch``), in one launch.

    Y[row, n] = sum_k A[row, k] B[expert of row, n, k]

An element is computed as by the dense products, in the same order along K, so an expert's output
for a token has the bits of a dense product with its matrix alone.  DGrad in INT8 is a product for
each part of a matrix, added to those before, which are FP32 in memory.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import LinearWeight
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows
from isobit.kernels.triton.e4m3 import PRODUCT_SCALE, decoded
from isobit.kernels.triton.gemm import Cut
from isobit.precision.quant_tensor import BLOCK, E4M3, Int8Parts, Int8Rows, num_blocks


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


@triton.jit(do_not_specialize=["rows", "a_scale_stride"])
def _grouped_gemm_kernel(
    A, B, A_SCALE, B_SCALE, OUT, EXPERTS, rows, a_scale_stride,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, INT8: tl.constexpr,
    DEPTH: tl.constexpr = 128, BEFORE=None, ADDS: tl.constexpr = False, ROW: tl.constexpr = None,
):  # fmt: skip
    """One program a tile of OUT [rows, N] of one expert and part, walked as in ``gemm``.  Scales
    are of blocks along K where SCALED; INT8 has them a row, behind the product.

    If it ADDS, INT8 is added to BEFORE, FP32 as OUT, or to zero.  The rows of A and B are ROW apart
    where that is not K.
    """
    as_bytes: tl.constexpr = A.dtype.element_ty == tl.uint8
    row_size: tl.constexpr = K if ROW is None else ROW
    tiles_of_part: tl.constexpr = (PART + BLOCK_N - 1) // BLOCK_N
    tiles_n: tl.constexpr = N // PART * tiles_of_part
    blocks_k: tl.constexpr = (K + DEPTH - 1) // DEPTH
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
    depth = tl.arange(0, DEPTH)
    a_place = A + row[:, None].to(tl.int64) * row_size + depth[None, :]
    b_place = B + b_row[None, :] * row_size + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT8 else tl.float32)
    for block in range(0, tl.where(label < 0, 0, blocks_k)):
        if K % DEPTH == 0:
            a = tl.load(a_place)
            b = tl.load(b_place)
        else:
            a = tl.load(a_place, mask=depth[None, :] < K - block * DEPTH, other=0.0)
            b = tl.load(b_place, mask=depth[:, None] < K - block * DEPTH, other=0.0)
        if as_bytes:
            a = decoded(a)
            b = decoded(b)
        if INT8:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif SCALED:
            scale = tl.load(A_SCALE + tl.cast(block, tl.int64) * a_scale_stride + row) * tl.load(
                B_SCALE + (expert * tiles_n + tile_n) * blocks_k + block
            )
            if as_bytes:
                scale *= PRODUCT_SCALE
            acc = tl.math.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], acc.shape), acc)
        else:
            acc = tl.dot(a, b, acc)
        a_place += DEPTH
        b_place += DEPTH
    if INT8:
        b_scale = tl.load(B_SCALE + b_row)
        acc = acc.to(tl.float32) * tl.load(A_SCALE + row)[:, None] * b_scale[None, :]
    if ADDS:
        before = 0.0  # which takes the sign from a zero
        if BEFORE is not None:
            place = BEFORE + row[:, None].to(tl.int64) * N + column[None, :]
            before = tl.load(place, mask=(within < PART)[None, :], other=0.0)
        acc = before + acc
    place = OUT + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=(within < PART)[None, :])


def grouped_gemm_nt(a: GroupedRows, b: ExpertMatrices, dispatch: Dispatch) -> torch.Tensor:
    """A [rows, K] in the contiguous layout, times each expert's B^T -> BF16 [rows, N].  Padding
    rows are undefined, but zeros give zeros, and rows of no expert are zeros.
    """
    out = torch.empty(
        (dispatch.rows, b.values.shape[1]), dtype=torch.bfloat16, device=a.values.device
    )
    multiply(a, b, dispatch, out, cut_of(b, dispatch), as_bytes=True)
    return out


def cut_of(b: ExpertMatrices, dispatch: Dispatch) -> Cut:
    """Tiles that fit every card's shared memory, and registers: two sums a number are held in
    E4M3.
    """
    if b.values.dtype == E4M3:
        return Cut(64, 4, 3)
    block_m, warps = tile_of_rows(dispatch, len(b.values))
    return Cut(block_m, warps, 3, depth=BLOCK if b.is_int8 else BLOCK // 2)


def tile_of_rows(dispatch: Dispatch, experts: int) -> tuple[int, int]:
    """Rows of a tile, which are one expert's, and its warps."""
    return (64, 4) if dispatch.places.numel() < BLOCK * experts else (128, 8)


def multiply(
    a: GroupedRows,
    b: ExpertMatrices,
    dispatch: Dispatch,
    out: torch.Tensor,
    cut: Cut,
    as_bytes: bool = False,
    before: torch.Tensor | None = None,
    adds: bool = False,
) -> None:
    """``grouped_gemm_nt`` to out [rows, N]; E4M3 ``as_bytes``.  With ``adds``, of INT8, to
    ``before``, FP32 [rows, N], or to zeros.
    """
    assert dispatch.experts is not None
    _, n, k = b.values.shape
    left, right, row = a.values, b.values, b.values.stride(1)
    assert left.stride(0) == row
    if as_bytes and b.values.dtype == E4M3:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    grid = (dispatch.rows // cut.block_m * (n // b.part) * num_blocks(b.part),)
    _grouped_gemm_kernel[grid](
        left, right, a.scales, b.scales, out, dispatch.experts, dispatch.rows,
        dispatch.height, n, k, b.part, cut.block_m, BLOCK, a.scales is not None, b.is_int8,
        cut.depth, before, adds, None if row == k else row,
        num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip


def int8_dgrad(dy: Int8Parts, weight: Int8Parts, dispatch: Dispatch) -> torch.Tensor:
    """dY [rows, ..] and W^T [E K, ..] of each row's expert, of the same parts in whole blocks -> dX
    BF16 [rows, K].
    """
    assert dy.parts == weight.parts
    rows, experts = len(dy.values), len(dispatch.counts)
    out = torch.empty(
        (rows, len(weight.values) // experts), dtype=torch.bfloat16, device=dy.values.device
    )
    turned = weight.values.view(experts, out.shape[1], -1)
    sums: torch.Tensor | None = None
    first = 0
    for part, size in enumerate(BLOCK * num_blocks(size) for size in dy.parts):
        columns = slice(first, first + size)
        left = GroupedRows(dy.values[:, columns], dy.scales[part])
        right = ExpertMatrices(turned[..., columns], weight.scales[part], out.shape[1])
        before, first = sums, first + size
        is_last = part == len(dy.parts) - 1
        if not is_last and sums is None:
            sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        to = out if is_last or sums is None else sums
        cut = cut_of(right, dispatch)
        multiply(left, right, dispatch, to, cut, before=before, adds=True)
    return out
