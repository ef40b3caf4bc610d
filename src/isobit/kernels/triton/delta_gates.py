"""The gated norm behind a delta rule, with its backward.

A head of DV numbers, with n = x / sqrt(mean(x^2) + eps), m = n w and s = sigmoid(gate):

    y       m gate s                                FP32, rounded once
    d gate  dy m (s + gate s (1 - s))
    dx      (d - n mean(d n)) / rms                 d = dy gate s w
    dw      sum over tokens and heads of dy gate s n

The sums are those of ``isobit.kernels.triton.pointwise``: a row's in a layout that depends on DV
alone, the weight's by blocks of rows, joined in one order (``add_block_sums``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.delta_rows import sigmoid
from isobit.kernels.triton.device_functions import add_block_sums
from isobit.kernels.triton.pointwise import BLOCKS, layout


@triton.jit
def _inverse_root(x, epsilon, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + epsilon) of each row."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + epsilon)


@triton.jit(do_not_specialize=["count"])
def _gated_norm_kernel(
    X, GATE, WEIGHT, OUT, count, epsilon, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program ROWS heads of D numbers, padded to WIDTH."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    weight = tl.load(WEIGHT + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
    inverse = _inverse_root(x, epsilon, D)
    y = x * inverse[:, None] * weight * (gate * sigmoid(gate))
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "rows_of_block"])
def _gated_norm_backward_kernel(
    DY, X, GATE, WEIGHT, DX, D_GATE, SUMS, count, rows_of_block, epsilon, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a block of rows, ROWS at a time; SUMS [blocks, D] may be None."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum((block + 1) * rows_of_block, count)
    for first in range(block * rows_of_block, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
        inverse = _inverse_root(x, epsilon, D)[:, None]
        normed = x * inverse
        share = sigmoid(gate)
        active = gate * share
        d_gate = dy * (normed * weight) * (share + active * (1.0 - share))
        tl.store(D_GATE + at, d_gate.to(D_GATE.dtype.element_ty), mask=inside)
        scaled = dy * active
        d = scaled * weight
        mean = tl.sum(d * normed, 1) / D
        dx = (d - normed * mean[:, None]) * inverse
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if SUMS is not None:
            sums += tl.sum(scaled * normed, 0)
    if SUMS is not None:
        tl.store(SUMS + block * D + column, sums, mask=column < D)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """RMSNorm of each head times silu of its gate, [T, H DV] each; weight [DV]."""
    x, gate = x.contiguous(), gate.contiguous()
    size = len(weight)
    out, count = torch.empty_like(x), x.numel() // size
    width, rows, warps = layout(size)
    if count:
        _gated_norm_kernel[(triton.cdiv(count, rows),)](
            x, gate, weight, out, count, epsilon, size, width, rows, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def gated_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the gate; that of the weight is added to ``grad``, FP32 [DV]."""
    size = len(weight)
    dy, x, gate = dy.contiguous(), x.contiguous(), gate.contiguous()
    dx, d_gate, count = torch.empty_like(x), torch.empty_like(gate), x.numel() // size
    if not count:
        return dx, d_gate
    width, rows, warps = layout(size)
    rows_of_block = triton.cdiv(triton.cdiv(count, BLOCKS), rows) * rows
    blocks = triton.cdiv(count, rows_of_block)
    sums = None
    if grad is not None:
        sums = torch.empty((blocks, size), dtype=torch.float32, device=x.device)
    _gated_norm_backward_kernel[(blocks,)](
        dy, x, gate, weight, dx, d_gate, sums, count, rows_of_block, epsilon, size, width, rows,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    if sums is not None and grad is not None:
        add_block_sums(sums, grad)
    return dx, d_gate
