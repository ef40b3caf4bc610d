"""Products of E4M3 blocks and of BF16, in Triton, along rows of both operands or, in BF16, along
B's columns (DGrad).

    E4M3   Y[m, n] = sum over blocks k of
                         (sum_j A[m, kj] B[n, kj]) * scale_a[m, k] * scale_b[n/128, k]
    BF16   Y[m, n] = sum_j A[m, j] B[n, j]

summed in FP32.  One program computes a whole element, by one fma a block of E4M3, and in BF16 in
the tensor cores' FP32 accumulator in steps of 16, both in ascending order of K, which is never
split.  So a row's bits do not depend on the number of rows, as long as all tiles are multiplied by
one instruction.  Below Hopper all are, by ``mma.sync`` of 16 rows and 16 columns of K.

Portable kernels read E4M3 as bytes and multiply FP16 (``isobit.kernels.triton.e4m3``).  A product
of two E4M3 numbers is exact there too, but tensor cores round sums of products, in a way that
belongs to a generation of cards: bits agree on one card, not between cards.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.device_functions import runs
from isobit.kernels.triton.e4m3 import PRODUCT_SCALE, decoded
from isobit.kernels.triton.quantise import QuantRows
from isobit.kernels.triton.sizes import SPLIT_PROGRAMS
from isobit.precision.quant_tensor import QuantTensor

_BLOCK = 128


@triton.jit(do_not_specialize=["m", "a_scale_stride"])
def _gemm_kernel(
    A, B, A_SCALE, B_SCALE, OUT, m, n, k, a_scale_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, WHOLE_K: tl.constexpr,
    DEPTH: tl.constexpr = 128, A_ROW: tl.constexpr = None, B_ROW: tl.constexpr = None,
):  # fmt: skip
    """One program a tile of OUT [m, n]; bands of 8 tile rows share B in the L2 cache.  A and B are
    BF16, or E4M3, or its bytes.

    The rows of A are A_ROW apart where that is not k.  With B_ROW, B is [k, n], and its rows are
    that far apart.
    """
    as_bytes: tl.constexpr = A.dtype.element_ty == tl.uint8
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    tile_m = band * 8 + tl.program_id(0) % (8 * tiles_n) % height
    tile_n = tl.program_id(0) % (8 * tiles_n) // height
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_row = (row % m).to(tl.int64)  # rows beyond the matrix repeat others and are not stored
    b_row = (column % n).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    a_place = A + a_row[:, None] * (k if A_ROW is None else A_ROW) + depth[None, :]
    if B_ROW is None:
        b_place = B + b_row[None, :] * k + depth[:, None]
    else:
        b_place = B + b_row[None, :] + depth[:, None].to(tl.int64) * B_ROW
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(k, DEPTH)):
        if WHOLE_K:
            a = tl.load(a_place)
            b = tl.load(b_place)
        else:
            a = tl.load(a_place, mask=depth[None, :] < k - block * DEPTH, other=0.0)
            b = tl.load(b_place, mask=depth[:, None] < k - block * DEPTH, other=0.0)
        if as_bytes:
            a = decoded(a)
            b = decoded(b)
        if SCALED:
            scale = tl.load(A_SCALE + block * a_scale_stride + a_row) * tl.load(
                B_SCALE + tile_n * tl.cdiv(k, 128) + block
            )
            if as_bytes:
                scale *= PRODUCT_SCALE
            acc = tl.math.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], acc.shape), acc)
        else:
            acc = tl.dot(a, b, acc)
        a_place += DEPTH
        b_place += DEPTH if B_ROW is None else DEPTH * B_ROW
    place = OUT + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a product into tiles; no choice changes a bit where all are multiplied by one
    instruction.
    """

    block_m: int
    warps: int
    stages: int
    block_n: int = _BLOCK
    depth: int = _BLOCK  # numbers of K that are read at once


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    cut: Cut,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    turned: bool = False,
) -> None:
    """A [M, K], B [N, K] -> A B^T to out [M, N], perhaps columns of a larger matrix: BF16, or E4M3
    or its bytes in 1x128 groups and in 128x128 blocks of one part.  In BF16 also A B, of B [K, N]
    that is ``turned``, and of rows of A that lie further apart.
    """
    (m, k), n = a.shape, b.shape[1 if turned else 0]
    assert a.stride(1) == b.stride(1) == 1
    assert turned or b.stride(0) == k
    grid = (triton.cdiv(m, cut.block_m) * triton.cdiv(n, cut.block_n),)
    stride = 0 if a_scales is None else a_scales.stride(1)
    _gemm_kernel[grid](
        a, b, a_scales, b_scales, out, m, n, k, stride, out.stride(0),
        cut.block_m, cut.block_n, a_scales is not None, k % cut.depth == 0, cut.depth,
        None if a.stride(0) == k else a.stride(0), b.stride(0) if turned else None,
        num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip


def fp8_gemm_nt(a: QuantRows, b: QuantTensor) -> torch.Tensor:
    """A [M, K] in 1x128 groups, B [N, K] in 128x128 blocks -> A B^T, BF16 [M, N], on every card.
    Each run of B's parts is multiplied into its own columns.
    """
    m, n = len(a.values), len(b.values)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=a.values.device)
    left, right = (one.values.view(torch.uint8) for one in (a, b))
    for run in runs(b.parts or (n,)) if m else ():
        rows = slice(run.first, run.first + run.size)
        scales = b.scales[run.first_block : run.first_block + run.blocks]
        launch(left, right[rows], out[:, rows], cut_of_bytes(m), a.scales, scales)
    return out


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A BF16 [M, K], B BF16 [N, K] -> A B^T, BF16 or FP32 [M, N], on every card, or to ``out``."""
    return _bf16_gemm(a, b, dtype, out, turned=False)


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A BF16 [M, K], B BF16 [K, N] -> A B, as ``bf16_gemm_nt``; rows may lie further apart."""
    return _bf16_gemm(a, b, dtype, out, turned=True)


def _bf16_gemm(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None, turned: bool
) -> torch.Tensor:
    assert a.dtype == b.dtype == torch.bfloat16
    m, n = len(a), b.shape[1 if turned else 0]
    if out is None:
        out = torch.empty((m, n), dtype=dtype, device=a.device)
    if m:
        launch(a, b, out, cut_of_bf16(m, n), turned=turned)
    return out


def tile(m: int) -> int:
    """Rows of a tile, which fits every card's shared memory."""
    return min(128, max(16, 1 << (m - 1).bit_length()))


def cut_of_bytes(m: int) -> Cut:
    """The cut for E4M3 as bytes."""
    block_m = tile(m)
    return Cut(block_m, 4 if block_m < 128 else 8, 3)


def cut_of_bf16(m: int, n: int) -> Cut:
    """Few rows take narrow tiles where B has few, so that more multiprocessors read it."""
    block_m = tile(m)
    if block_m < 64:
        return Cut(block_m, 4, 4, block_n=32 if n <= 64 * SPLIT_PROGRAMS else 64)
    return Cut(block_m, 4, 3, depth=64)
