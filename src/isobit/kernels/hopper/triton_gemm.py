"""The GEMM that needs no library, for FP8 blocks and for BF16: slower than DeepGEMM, with the same
bits.

    E4M3   Y[m, n] = sum over blocks k, ascending, of
                         fma(sum_j A[m, kj] B[n, kj], scale_a[m, k] * scale_b[n/128, k], .)
    BF16   Y[m, n] = sum_j A[m, j] B[n, j]

the BF16 sum in the tensor cores' FP32 accumulator, ascending in steps of 16.

One program makes a whole element, K is never split, and both tiles, 64x128 and 128x128, issue wgmma
of 64 rows: an element's operations are the same in either.  A tile of fewer than 64 rows would be
lowered to another instruction with other bits.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.quantise import QuantRows
from isobit.precision.quant_tensor import QuantTensor

_BLOCK = 128
_PROGRAMS = (
    132  # multiprocessors of a Hopper card: from as many large tiles on, large tiles are the faster
)


@triton.jit(do_not_specialize=["m", "a_scale_stride"])
def _gemm_kernel(
    A, B, A_SCALE, B_SCALE, OUT, m, n, k, a_scale_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """One program a tile of OUT [m, n]; the tiles of 8 tile rows are walked column by column, so
    that they share B in the L2 cache.
    """
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
    depth = tl.arange(0, 128)
    a_place = A + a_row[:, None] * k + depth[None, :]
    b_place = B + b_row[None, :] * k + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(k, 128)):
        if WHOLE_K:
            a = tl.load(a_place)
            b = tl.load(b_place)
        else:
            a = tl.load(a_place, mask=depth[None, :] < k - block * 128, other=0.0)
            b = tl.load(b_place, mask=depth[:, None] < k - block * 128, other=0.0)
        if SCALED:
            scale = tl.load(A_SCALE + block * a_scale_stride + a_row) * tl.load(
                B_SCALE + tile_n * tl.cdiv(k, 128) + block
            )
            acc = tl.math.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], acc.shape), acc)
        else:
            acc = tl.dot(a, b, acc)
        a_place += 128
        b_place += 128
    place = OUT + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def triton_fp8_gemm_nt(a: QuantRows, b: QuantTensor, out: torch.Tensor) -> None:
    """A [M, K] in 1x128 groups, B [N, K] in 128x128 blocks of one part -> A B^T to out, BF16
    [M, N], perhaps columns of a larger matrix.
    """
    _launch(a.values, b.values, out, a.scales, b.scales)


def triton_bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A BF16 [M, K], B BF16 [N, K] -> A B^T, BF16 or FP32 [M, N]; any sizes."""
    out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
    _launch(a, b, out)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
) -> None:
    (m, k), n = a.shape, b.shape[0]
    block_m, warps = tile(m, n)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, _BLOCK),)
    stride = 0 if a_scales is None else a_scales.stride(1)
    _gemm_kernel[grid](
        a, b, a_scales, b_scales, out, m, n, k, stride, out.stride(0),
        block_m, _BLOCK, a_scales is not None, k % _BLOCK == 0,
        num_warps=warps, num_stages=stages(block_m, a.element_size()), enable_fp_fusion=False,
    )  # fmt: skip


def tile(m: int, n: int) -> tuple[int, int]:
    """Rows of a tile and warps of its program: small tiles where large ones would leave
    multiprocessors idle.
    """
    large = triton.cdiv(m, 128) * triton.cdiv(n, _BLOCK) >= _PROGRAMS and m > 64
    return (128, 8) if large else (64, 4)


def stages(block_m: int, element_size: int) -> int:
    """Tiles of A and B that fit the shared memory at once, for loads in flight."""
    return min(6, 196 * 1024 // ((block_m + _BLOCK) * _BLOCK * element_size))
