"""The backward of ``isobit.kernels.triton.qkv``, from attention's gradients to the qkv GEMM's, in
one kernel.

    y = H y                                                 Q and K in 8 bits, in FP32; dQ divided
                                                            by the size of H
    g = BF16(y1 cos + y2 sin | y2 cos - y1 sin)             Q and K: rotated by minus the angle
    n = x / sqrt(mean(x^2) + eps),  x = BF16(qkv + bias)    Q and K, in models that have these norms
    s = g w
    d = BF16((s - n mean(s n)) / rms)                       dw += sum over tokens and heads of g n
    d = dv                                                  V
    dbias += sum over tokens of d                           in models that have a bias

Quantisation passes gradients straight through.  Rounding is that of ``isobit.kernels.spec``;
without norms d has its bits, with norms they differ where a sum of D numbers rounds differently.

A head is two halves, in registers of HALF numbers, a power of two.  Where that is more than a half
has, H pairs numbers of both halves, and those that its last step pairs are loaded, too.

A program takes N tokens and up to HEADS heads of one kind and leaves its sums over tokens to
``add_block_sums``, which has one order for every number of tokens.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import QkvGradients, QkvTransform
from isobit.kernels.triton.attention_tile import _within
from isobit.kernels.triton.device_functions import add_block_sums, hadamard, rotated
from isobit.kernels.triton.qkv import _inverse_root, _load, _row

N = 32  # tokens of a program
HEADS = 8  # heads of a program
WARPS = 8


@triton.jit
def _back_through_norm(
    QKV, BIAS, NORM, g1, g2, t, inside, first, epsilon,
    WIDTH: tl.constexpr, N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Gradients behind the norm of the head at ``first`` -> before it, and the weight's terms."""
    j = tl.arange(0, HALF)
    there = None if D == 2 * HALF else j < D // 2
    x1 = _load(QKV, BIAS, t, inside, first + j, there, WIDTH)
    x2 = _load(QKV, BIAS, t, inside, first + D // 2 + j, there, WIDTH)
    inverse = _inverse_root(x1, x2, epsilon, N, D, HALF)
    n1 = x1 * inverse
    n2 = x2 * inverse
    s1 = g1 * _row(NORM, j, there)
    s2 = g2 * _row(NORM, D // 2 + j, there)
    mean = (tl.sum(s1 * n1 + s2 * n2, 1) / D)[:, None]
    return (s1 - n1 * mean) * inverse, (s2 - n2 * mean) * inverse, g1 * n1, g2 * n2


@triton.jit
def _store_columns(
    D_QKV, BIAS_SUMS, block, t, inside, first, d, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """BF16 [N, PADDED] to the COUNT columns from ``first`` on of tokens t, and their sums over the
    tokens.
    """
    j = tl.arange(0, PADDED)
    stored = _within(inside[:, None], j, COUNT, PADDED, 0)
    tl.store(D_QKV + t[:, None] * WIDTH + (first + j)[None, :], d, mask=stored)
    if BIAS_SUMS is not None:
        there = None if COUNT == PADDED else j < COUNT
        tl.store(BIAS_SUMS + block * WIDTH + first + j, tl.sum(d.to(tl.float32), 0), mask=there)


@triton.jit
def _through_blocks(
    D_HEADS, row, inside, column, N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr
):
    """Columns of H x of vectors in FP32, H of blocks of APART pairs, half of HALF: [N, HALF], of
    which the columns of the first D / 2 are there.
    """
    APART: tl.constexpr = HALF // 4
    at = D_HEADS + row[:, None] * D
    there = _within(inside[:, None], tl.arange(0, HALF), D // 2, HALF, 0)
    own = tl.load(at + column[None, :], mask=there, other=0.0).to(tl.float32)
    other = tl.load(at + (column ^ APART)[None, :], mask=there, other=0.0).to(tl.float32)
    own = rotated(own, N, HALF, 5 if HALF == 128 else 4)
    other = rotated(other, N, HALF, 5 if HALF == 128 else 4)
    return tl.where((column & APART == 0)[None, :], other + own, other - own)


@triton.jit
def _rotated_heads(
    D_HEADS, QKV, BIAS, NORM, COS, SIN, POSITION, D_QKV, NORM_SUMS, BIAS_SUMS, tokens, epsilon,
    unit, units, first_head,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr, HADAMARD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Up to HEADS of the COUNT heads of Q or K, which begin in qkv at ``first_head``.

    A head is two halves [N, HALF] in registers, since the rotation pairs j with D / 2 + j.  After H
    (HADAMARD) it was divided by SIZE.
    """
    block = tl.program_id(0).to(tl.int64)
    t = block * N + tl.arange(0, N)
    inside = t < tokens
    j = tl.arange(0, HALF)
    along = None if D == 2 * HALF else (j < D // 2)[None, :]
    ZERO: tl.constexpr = None if D == 2 * HALF else 0.0
    angle = tl.load(POSITION + t, mask=inside, other=0)[:, None] * (D // 2) + j[None, :]
    cos = tl.load(COS + angle, mask=along, other=ZERO)
    sin = tl.load(SIN + angle, mask=along, other=ZERO)

    # Terms of the norm's gradient, summed over the heads here and over the tokens at the end.
    sum1 = tl.zeros([N, HALF], tl.float32)
    sum2 = tl.zeros([N, HALF], tl.float32)
    for head in tl.range(unit * HEADS, tl.minimum(unit * HEADS + HEADS, COUNT), num_stages=1):
        # Back through H and the rotation: D_HEADS is [T, COUNT, D].
        row = t * COUNT + head
        if HADAMARD and D < 2 * HALF:
            y1 = _through_blocks(D_HEADS, row, inside, j, N, D, HALF)
            y2 = _through_blocks(D_HEADS, row, inside, D // 2 + j, N, D, HALF)
        else:
            at = D_HEADS + row[:, None] * D + j[None, :]
            read = _within(inside[:, None], j, D // 2, HALF, 0)
            y1 = tl.load(at, mask=read, other=0.0).to(tl.float32)
            y2 = tl.load(at + D // 2, mask=read, other=0.0).to(tl.float32)
            if HADAMARD:
                y1, y2 = hadamard(y1, y2, N, HALF)
        if HADAMARD:
            y1 *= 1.0 / SIZE
            y2 *= 1.0 / SIZE
        d1 = (y1 * cos + y2 * sin).to(tl.bfloat16)
        d2 = (y2 * cos - y1 * sin).to(tl.bfloat16)
        first = (first_head + head) * D

        if NORM is not None:
            g1 = d1.to(tl.float32)
            g2 = d2.to(tl.float32)
            x1, x2, term1, term2 = _back_through_norm(
                QKV, BIAS, NORM, g1, g2, t, inside, first, epsilon, WIDTH, N, D, HALF,
            )  # fmt: skip
            d1 = x1.to(tl.bfloat16)
            d2 = x2.to(tl.bfloat16)
            if NORM_SUMS is not None:
                sum1 += term1
                sum2 += term2

        _store_columns(D_QKV, BIAS_SUMS, block, t, inside, first, d1, WIDTH, D // 2, HALF)
        first += D // 2
        _store_columns(D_QKV, BIAS_SUMS, block, t, inside, first, d2, WIDTH, D // 2, HALF)

    # This program's row of [blocks * units, D], for ``add_block_sums``.
    if NORM_SUMS is not None:
        sums = NORM_SUMS + (block * units + unit) * D + j
        there = None if D == 2 * HALF else j < D // 2
        tl.store(sums, tl.sum(sum1, 0), mask=there)
        tl.store(sums + D // 2, tl.sum(sum2, 0), mask=there)


@triton.jit
def _value_heads(
    DV, D_QKV, BIAS_SUMS, tokens, unit, first_head,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Up to HEADS of the COUNT heads of V."""
    block = tl.program_id(0).to(tl.int64)
    t = block * N + tl.arange(0, N)
    inside = t < tokens
    d = tl.arange(0, PADDED)
    read = _within(inside[:, None], d, D, PADDED, 0)
    for head in tl.range(unit * HEADS, tl.minimum(unit * HEADS + HEADS, COUNT), num_stages=1):
        at = (t * COUNT + head)[:, None] * D + d[None, :]
        dv = tl.load(DV + at, mask=read, other=0.0)
        first = (first_head + head) * D
        _store_columns(D_QKV, BIAS_SUMS, block, t, inside, first, dv, WIDTH, D, PADDED)


@triton.jit(do_not_specialize=["tokens"])
def _qkv_kernel(
    DQ, DK, DV, QKV, BIAS, Q_NORM, K_NORM, COS, SIN, POSITION, D_QKV, Q_SUMS, K_SUMS, BIAS_SUMS,
    tokens, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """One program N tokens and up to HEADS heads of Q, of K or of V."""
    WIDTH: tl.constexpr = (H + 2 * G) * D
    QUERY_UNITS: tl.constexpr = (H + HEADS - 1) // HEADS
    KEY_UNITS: tl.constexpr = (G + HEADS - 1) // HEADS
    unit = tl.program_id(1)
    if unit < QUERY_UNITS:
        _rotated_heads(
            DQ, QKV, BIAS, Q_NORM, COS, SIN, POSITION, D_QKV, Q_SUMS, BIAS_SUMS, tokens, epsilon,
            unit, QUERY_UNITS, 0,
            H, WIDTH, D, HALF, N, HEADS, HADAMARD, D & -D,
        )  # fmt: skip
    elif unit < QUERY_UNITS + KEY_UNITS:
        _rotated_heads(
            DK, QKV, BIAS, K_NORM, COS, SIN, POSITION, D_QKV, K_SUMS, BIAS_SUMS, tokens, epsilon,
            unit - QUERY_UNITS, KEY_UNITS, H,
            G, WIDTH, D, HALF, N, HEADS, HADAMARD, 1,
        )  # fmt: skip
    else:
        _value_heads(
            DV, D_QKV, BIAS_SUMS, tokens, unit - QUERY_UNITS - KEY_UNITS, H + G,
            G, WIDTH, D, 2 * HALF, N, HEADS,
        )  # fmt: skip


def qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    grads: QkvGradients,
) -> torch.Tensor:
    """BF16 dq [T, H, D], dk and dv [T, G, D], and the forward's qkv, transform and positions ->
    BF16 d_qkv [T, (H + 2G) D], all contiguous.

    Adds to the gradients of the norms, FP32 [D], and of the bias, FP32 [(H + 2G) D], where they are
    given; only of weights that the transform has.
    """
    tokens, heads, kv_heads, dim = (
        qkv.shape[0],
        transform.num_heads,
        transform.num_kv_heads,
        transform.head_dim,
    )
    d_qkv = torch.empty_like(qkv)
    if not tokens:
        return d_qkv
    blocks, query_units, key_units = (
        triton.cdiv(n, unit) for n, unit in ((tokens, N), (heads, HEADS), (kv_heads, HEADS))
    )

    # FP32 sums of each block of tokens and, of the norms, of each unit of heads.
    def sums(grad: torch.Tensor | None, units: int) -> torch.Tensor | None:
        return (
            None
            if grad is None
            else torch.empty((blocks * units, grad.numel()), dtype=torch.float32, device=qkv.device)
        )

    parts = (
        (grads.q_norm, sums(grads.q_norm, query_units)),
        (grads.k_norm, sums(grads.k_norm, key_units)),
        (grads.bias, sums(grads.bias, 1)),
    )
    _qkv_kernel[(blocks, query_units + 2 * key_units)](
        dq, dk, dv, qkv, transform.bias, transform.q_norm, transform.k_norm, transform.cos,
        transform.sin, positions, d_qkv,
        *(part for _, part in parts), tokens, transform.epsilon, heads, kv_heads, dim,
        triton.next_power_of_2(dim) // 2, N, HEADS, transform.hadamard, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip

    for grad, part in parts:
        if grad is not None and part is not None:
            add_block_sums(part, grad)
    return d_qkv
