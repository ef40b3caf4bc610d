"""The operations of families with a gated delta rule (``HybridOperations``): its gated norm, the
gate behind attention, and the sum of a mixture with its shared expert.  With s = sigmoid(g):

    y  x s                  dx  dy s            dg  dy x s (1 - s)             a gate of x
    y  routed + s shared    d shared  dy s      dg  s (1 - s) sum(dy shared)   g one number a token

in FP32, rounded once.  A row's sum is in a layout that depends on the number of channels alone.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.delta_gates import gated_norm, gated_norm_backward
from isobit.kernels.triton.delta_rows import sigmoid
from isobit.kernels.triton.pointwise import columns_of_program, layout


@triton.jit
def _sigmoid_kernel(X, GATE, OUT, count, WIDTH: tl.constexpr):
    """One program WIDTH numbers."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(X + at, mask=at < count, other=0.0).to(tl.float32)
    gate = tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(OUT + at, (x * sigmoid(gate)).to(OUT.dtype.element_ty), mask=at < count)


@triton.jit
def _sigmoid_backward_kernel(DY, X, GATE, DX, D_GATE, count, WIDTH: tl.constexpr):
    """One program WIDTH numbers."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    dy = tl.load(DY + at, mask=at < count, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=at < count, other=0.0).to(tl.float32)
    share = sigmoid(tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32))
    tl.store(DX + at, (dy * share).to(DX.dtype.element_ty), mask=at < count)
    d_gate = dy * x * share * (1.0 - share)
    tl.store(D_GATE + at, d_gate.to(D_GATE.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _add_kernel(
    ROUTED, SHARED, GATE, OUT, count, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program ROWS tokens of C channels, padded to WIDTH."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < C)[None, :]
    at = row[:, None] * C + column[None, :]
    share = sigmoid(tl.load(GATE + row, mask=row < count, other=0.0))
    routed = tl.load(ROUTED + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(SHARED + at, mask=inside, other=0.0).to(tl.float32)
    y = routed + share[:, None] * shared
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add_backward_kernel(
    DY, SHARED, GATE, D_SHARED, D_GATE, count, C: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program ROWS tokens of C channels, padded to WIDTH."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < C)[None, :]
    at = row[:, None] * C + column[None, :]
    share = sigmoid(tl.load(GATE + row, mask=row < count, other=0.0))
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(SHARED + at, mask=inside, other=0.0).to(tl.float32)
    d_shared = dy * share[:, None]
    tl.store(D_SHARED + at, d_shared.to(D_SHARED.dtype.element_ty), mask=inside)
    d_gate = tl.sum(dy * shared, 1) * share * (1.0 - share)
    tl.store(D_GATE + row, d_gate, mask=row < count)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times the sigmoid of its gate, [T, N] each."""
    x, gate = x.contiguous(), gate.contiguous()
    out, width = torch.empty_like(x), columns_of_program(x.numel())
    if len(x):
        _sigmoid_kernel[(triton.cdiv(x.numel(), width),)](
            x, gate, out, x.numel(), width, num_warps=4, enable_fp_fusion=False
        )
    return out


def sigmoid_gate_backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the gate."""
    dy, x, gate = dy.contiguous(), x.contiguous(), gate.contiguous()
    dx, d_gate = torch.empty_like(x), torch.empty_like(gate)
    width = columns_of_program(x.numel())
    if len(x):
        _sigmoid_backward_kernel[(triton.cdiv(x.numel(), width),)](
            dy, x, gate, dx, d_gate, x.numel(), width, num_warps=4, enable_fp_fusion=False
        )
    return dx, d_gate


def add_shared(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """What the routed experts and the shared one make [T, C], and its gate FP32 [T], contiguous ->
    [T, C].
    """
    out, (count, columns) = torch.empty_like(routed), routed.shape
    width, rows, warps = layout(columns)
    if count:
        _add_kernel[(triton.cdiv(count, rows),)](
            routed, shared, gate, out, count, columns, width, rows, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def add_shared_backward(
    dy: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the shared expert's output and of its gate, FP32 [T]; that of the routed
    experts is dy.
    """
    d_shared, d_gate, (count, columns) = torch.empty_like(shared), torch.empty_like(gate), dy.shape
    width, rows, warps = layout(columns)
    if count:
        _add_backward_kernel[(triton.cdiv(count, rows),)](
            dy, shared, gate, d_shared, d_gate, count, columns, width, rows, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return d_shared, d_gate


class TritonHybrid:
    """``HybridOperations`` of a GPU."""

    gated_norm = staticmethod(gated_norm)
    gated_norm_backward = staticmethod(gated_norm_backward)
    sigmoid_gate = staticmethod(sigmoid_gate)
    sigmoid_gate_backward = staticmethod(sigmoid_gate_backward)
    add_shared = staticmethod(add_shared)
    add_shared_backward = staticmethod(add_shared_backward)
