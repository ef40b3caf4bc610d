"""The backward of a layer's experts on Hopper, over the rows of all choices together.

    d_out = w * dy, rounded to BF16;   d_w = <dy, out>, FP32
    down:      dX by a grouped GEMM, dW of each expert over its rows
    SwiGLU
    gate_up:   the same
    dx[t] = sum over ranks of dX       FP32, in their order, rounded once

Rows are those of ``experts_saving``: an expert's begin at a multiple of 128 and are filled up with
zeros, so the quantisers of the dense linear take them all at once, in groups that never mix two
experts, and a tile of a GEMM has one expert.  Matrices are transposed for DGrad a layer at a time.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.dispatch import Dispatch, GroupedRows, combine, gather
from isobit.kernels.hopper.experts import SavedExperts, expert_site
from isobit.kernels.hopper.grouped_gemm import (
    ExpertMatrices,
    grouped_gemm_nt,
    grouped_gemm_tn,
    transpose_experts,
)
from isobit.kernels.hopper.linear import input_saved, output_gradient
from isobit.kernels.hopper.swiglu import swiglu_backward, swiglu_saved
from isobit.kernels.operands import ExpertGradients, LinearWeight, Operand, Routing


@triton.jit
def _weigh_kernel(
    DY, WEIGHTS, PLACES, ROWS, D_ROWS, D_WEIGHTS,
    C: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """One program a choice."""
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACES + choice).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < C
    dy = tl.load(DY + choice // TOP_K * C + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(ROWS + row * C + column, mask=inside, other=0.0).to(tl.float32)
    d = (dy * tl.load(WEIGHTS + choice)).to(tl.bfloat16)
    tl.store(D_ROWS + row * C + column, d, mask=inside)
    tl.store(D_WEIGHTS + choice, tl.sum(dy * x, 0))


def experts_backward(
    dy: torch.Tensor,
    saved: SavedExperts,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    grads: ExpertGradients,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy BF16 [T, C] -> dx BF16 [T, C], and the gradient of the routing's weights, FP32 [T, k]."""
    dispatch, num_experts = saved.dispatch, routing.logits.shape[1]
    wide, narrow = (expert_site(weight, num_experts) for weight in (gate_up, down))
    d_outputs, d_weights = _weigh(dy, saved.outputs, dispatch, routing.weights)
    d = output_gradient(d_outputs, narrow)
    activation = swiglu_saved(saved.gate_up, narrow)
    grouped_gemm_tn(d.tokens, activation, grads.down, dispatch, num_experts)
    d_activation = _dgrad(d.rows, down, dispatch)
    del d_outputs, activation
    d = swiglu_backward(d_activation, saved.gate_up, wide)
    x = input_saved(gather(saved.x, dispatch, pads=True).values, wide)
    grouped_gemm_tn(d.tokens, x, grads.gate_up, dispatch, num_experts)
    del d_activation, x
    return combine(_dgrad(d.rows, gate_up, dispatch), dispatch), d_weights


def _weigh(
    dy: torch.Tensor, outputs: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy [T, C] -> the gradient of the choices' rows, BF16 [rows, C], and of their weights."""
    columns, top_k = dy.shape[1], weights.shape[1]
    d_outputs, d_weights = torch.zeros_like(outputs), torch.empty_like(weights)
    width = triton.next_power_of_2(columns)
    _weigh_kernel[(weights.numel(),)](
        dy, weights, dispatch.places, outputs, d_outputs, d_weights, columns, width, top_k,
        num_warps=8 if width >= 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return d_outputs, d_weights


def _dgrad(dy: Operand, weight: LinearWeight, dispatch: Dispatch) -> torch.Tensor:
    """dX = dY W of each row's expert, BF16 [rows, K]."""
    matrices = ExpertMatrices.of(weight, dispatch.counts.shape[0])
    return grouped_gemm_nt(GroupedRows.of(dy), transpose_experts(matrices), dispatch)
