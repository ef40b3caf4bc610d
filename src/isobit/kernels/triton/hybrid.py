"""The operations of families with a gated delta rule (``HybridOperations``): its gates, and the sum
of a mixture with its shared expert.

    y       routed + s shared               s = sigmoid(g), g FP32, one number a token; rounded once
    d shared    dy s            dg  s (1 - s) sum(dy shared)

A row's sum is in a layout that depends on the number of channels alone.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.delta_gates import (
    gated_norm,
    gated_norm_backward,
    sigmoid_gate,
    sigmoid_gate_backward,
)
from isobit.kernels.triton.delta_rows import sigmoid
from isobit.kernels.triton.pointwise import layout


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
