"""WGrad: the FP32 sum over tokens of one linear or of all experts, added once to the gradient.

    BF16   grad[n, k] += scale * sum_t dY[t, n] X[t, k]
    E4M3   grad[n, k] += sum over groups t of 128 tokens of
                             (sum_j dY^T[n, tj] X^T[k, tj]) * scale_y[n, t] * scale_x[k, t]
    INT8   grad[n, k] += float(sum_t dY^T[n, t] X^T[k, t]) * scale_y[n] * scale_x[k]

One program computes a whole element, over its tokens in ascending order: in BF16 in the tensor
cores' FP32 accumulator, in E4M3, which is read as bytes, by one fma a group, in INT8 as an integer,
which has no order.  With experts, whose rows of tokens are in whole groups
(``isobit.kernels.triton.dispatch``), a program takes the groups of one of them.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.e4m3 import PRODUCT_SCALE, decoded
from isobit.kernels.triton.int8 import scaled
from isobit.kernels.triton.int8_backward import BalancedRows
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.quant_tensor import BLOCK, num_blocks

_STEP = 64  # tokens of BF16 that are read at once


@triton.jit(do_not_specialize=["tokens", "scale"])
def _wgrad_kernel(
    A, B, GRAD, STARTS, tokens, scale, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr,
):  # fmt: skip
    """One program a tile of the gradient FP32 [N, K] of A [tokens, N] and B [tokens, K], whose rows
    are A_ROW and B_ROW apart, ROWS of them at a time; with STARTS, of one expert's.  A ``scale`` of
    None is 1.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(0) // (tiles_n * tiles_k)
    within = tl.program_id(0) % (tiles_n * tiles_k)
    n = within % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = within // tiles_n * BLOCK_K + tl.arange(0, BLOCK_K)
    if STARTS is None:
        first = 0
        end = tokens
        row = tl.arange(0, ROWS).to(tl.int64)
    else:
        first = tl.load(STARTS + expert) * 128
        end = tl.load(STARTS + expert + 1) * 128
        row = first.to(tl.int64) + tl.arange(0, ROWS)
    a_place = A + row[None, :] * A_ROW + (n % N)[:, None]  # those beyond repeat others, not stored
    b_place = B + row[:, None] * B_ROW + (k % K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(first, end, ROWS):
        if STARTS is None:
            there = begin + tl.arange(0, ROWS) < end
            a = tl.load(a_place, mask=there[None, :], other=0.0)
            b = tl.load(b_place, mask=there[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
        else:
            acc = tl.dot(tl.load(a_place), tl.load(b_place), acc)
        a_place += ROWS * A_ROW
        b_place += ROWS * B_ROW
    if scale is not None:
        acc *= scale
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = GRAD + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(place, tl.load(place, mask=inside) + acc, mask=inside)


@triton.jit(do_not_specialize=["groups"])
def _groups_kernel(
    A, B, A_SCALE, B_SCALE, GRAD, STARTS, groups, row_size, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a tile of the gradient FP32 [N, K] of A [N, row_size] and B [K, row_size], of so
    many groups of tokens; with STARTS, of one expert's.  E4M3's bytes have the scales of
    ``QuantRows``; INT8 has one a row, of each expert.
    """
    is_int8: tl.constexpr = A.dtype.element_ty == tl.int8
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(0) // (tiles_n * tiles_k)
    within = tl.program_id(0) % (tiles_n * tiles_k)
    n = within % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = within // tiles_n * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = 0
    end = groups
    if STARTS is not None:
        begin = tl.load(STARTS + expert)
        end = tl.load(STARTS + expert + 1)
    a_row = (n % N).to(tl.int64)
    b_row = (k % K).to(tl.int64)
    token = begin * 128 + tl.arange(0, 128)
    a_place = A + a_row[:, None] * row_size + token[None, :]
    b_place = B + b_row[None, :] * row_size + token[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.int32 if is_int8 else tl.float32)
    for group in range(begin, end):
        if is_int8:
            acc = tl.dot(tl.load(a_place), tl.load(b_place), acc, out_dtype=tl.int32)
        else:
            product = tl.dot(decoded(tl.load(a_place)), decoded(tl.load(b_place)))
            at = tl.cast(group, tl.int64)
            left = tl.load(A_SCALE + at * ((N + 3) // 4 * 4) + a_row) * PRODUCT_SCALE
            right = tl.load(B_SCALE + at * ((K + 3) // 4 * 4) + b_row)
            acc = tl.math.fma(product, left[:, None] * right[None, :], acc)
        a_place += 128
        b_place += 128
    if is_int8:
        left = tl.load(A_SCALE + expert * N + a_row)
        acc = scaled(acc, left[:, None], tl.load(B_SCALE + expert * K + b_row)[None, :])
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = GRAD + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    before = tl.load(place, mask=inside)
    if is_int8 and STARTS is not None:  # the scales of an expert without tokens are undefined
        inside = inside & (end > begin)
    tl.store(place, before + acc, mask=inside)


def bf16_gemm_tn(
    dy: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    scale: float = 1.0,
    starts: torch.Tensor | None = None,
    stages: int = 3,
) -> None:
    """grad, FP32 [N, K], contiguous, += scale dY^T X, of dY [T, N] and X [T, K] in BF16, perhaps
    columns of larger matrices.

    With ``starts``, int32 [E + 1], grad is [E N, K], and expert e has the groups of 128 tokens from
    starts[e] to starts[e + 1].
    """
    n, k = dy.shape[1], x.shape[1]
    assert dy.stride(1) == x.stride(1) == 1
    _wgrad_kernel[(_programs(grad, n, k, starts),)](
        dy, x, grad, starts, len(x) if starts is None else None, None if scale == 1.0 else scale,
        n, k, BLOCK, BLOCK, _STEP, dy.stride(0), x.stride(0), num_warps=8, num_stages=stages,
    )  # fmt: skip


def fp8_gemm_tn(
    dy: QuantRows, x: QuantRows, grad: torch.Tensor, starts: torch.Tensor | None = None
) -> None:
    """``bf16_gemm_tn`` of dY^T [N, Tp] and X^T [K, Tp] in groups of 128 tokens."""
    for one in (dy, x):
        assert one.scales.stride() == (1, -(-len(one.values) // 4) * 4)
    values = dy.values.view(torch.uint8), x.values.view(torch.uint8)
    _multiply_groups(*values, dy.scales, x.scales, grad, starts)


def int8_gemm_tn(
    dy: BalancedRows, x: BalancedRows, grad: torch.Tensor, starts: torch.Tensor
) -> None:
    """``bf16_gemm_tn`` of dY^T [N, Tp] and X^T [K, Tp] in INT8, of experts."""
    _multiply_groups(dy.values, x.values, dy.scales, x.scales, grad, starts)


def _multiply_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    grad: torch.Tensor,
    starts: torch.Tensor | None,
) -> None:
    assert a.is_contiguous()
    assert b.is_contiguous()
    (n, tokens), k = a.shape, len(b)
    columns, warps = tile_of_groups(a.dtype)
    _groups_kernel[(_programs(grad, n, k, starts, columns),)](
        a, b, a_scales, b_scales, grad, starts, num_blocks(tokens), tokens, n, k, BLOCK, columns,
        num_warps=warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


def tile_of_groups(dtype: torch.dtype) -> tuple[int, int]:
    """Columns of a tile and its warps: E4M3 has two sums a number, which fill the registers."""
    return (64, 4) if dtype == torch.uint8 else (BLOCK, 8)


def _programs(
    grad: torch.Tensor, n: int, k: int, starts: torch.Tensor | None, columns: int = BLOCK
) -> int:
    experts = 1 if starts is None else len(starts) - 1
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    assert grad.shape == (experts * n, k)
    return experts * num_blocks(n) * -(-k // columns)
