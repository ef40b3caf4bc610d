"""The experts of a layer on Hopper: dispatch, two grouped GEMMs with SwiGLU between them, and the
sum over each token's choices.

    rows of the choices, by expert        ``dispatch``: bytes and scales as they are
    gate_up = rows W_gate_up^T            ``grouped_gemm``
    activation, as down reads it          for the choices alone: padding is left out
    out = activation W_down^T             ``grouped_gemm``
    y[t] = sum over ranks of w * out      FP32, in their order, rounded once

Few tokens go to DeepGEMM's masked kernel, which skips what is empty; more, and everything that has
a backward, are laid out without gaps.  Both give the same bits.  With a backward, padding is zeros,
so that what was made here can be quantised in whole groups of 128 rows (``experts_backward``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.dispatch import Dispatch, GroupedRows, combine, gather, make_dispatch
from isobit.kernels.hopper.grouped_gemm import ExpertMatrices, grouped_back_end, grouped_gemm_nt
from isobit.kernels.hopper.quantise import gated, quantise_groups
from isobit.kernels.hopper.sizes import MASKED_TOKENS
from isobit.kernels.operands import LinearInput, LinearWeight, Operand, Routing
from isobit.precision.flow import Site
from isobit.precision.formats import BLOCK, ScaleKind
from isobit.precision.quant_tensor import num_blocks


@dataclass(frozen=True, slots=True)
class SavedExperts:
    """What ``experts_backward`` reads; rows are places, padding is zeros."""

    x: torch.Tensor
    """The input, BF16 [T, C]."""
    dispatch: Dispatch
    gate_up: torch.Tensor
    """BF16 [rows, 2 I]"""
    outputs: torch.Tensor
    """BF16 [rows, C]"""


@triton.jit(do_not_specialize=["height"])
def _swiglu_rows_kernel(
    GATE_UP, PLACES, VALUES, SCALES, height,
    C: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of the row of one choice: gate [row, column], up [row, C + column];
    without SCALES in BF16.
    """
    row = tl.load(PLACES + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    inside = column < C
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    y = gated(gate, up)
    if SCALES is None:
        tl.store(VALUES + row * C + column, y, mask=inside)
    else:
        values, scales = quantise_groups(y.to(tl.float32), GROUPS, POWER_OF_TWO)
        tl.store(VALUES + row * C + column, values, mask=inside)
        number: tl.constexpr = (C + 127) // 128
        group = first + tl.arange(0, GROUPS)
        place = SCALES + row // height * number * height + row % height
        tl.store(place + group.to(tl.int64) * height, scales, mask=group < number)


def swiglu_rows(
    gate_up: torch.Tensor, dispatch: Dispatch, scales: ScaleKind | None, pads: bool
) -> GroupedRows:
    """BF16 [rows, 2 I] -> ``swiglu`` of the choices' rows as down reads it; padding is zeros where
    ``pads``.
    """
    columns = gate_up.shape[1] // 2
    out = GroupedRows.empty(dispatch, columns, gate_up.device, scales is not None)
    if pads:
        out.zero_()
    groups = min(8, triton.next_power_of_2(num_blocks(columns)))
    grid = (dispatch.places.numel(), triton.cdiv(columns, groups * BLOCK))
    _swiglu_rows_kernel[grid](
        gate_up, dispatch.places, out.values, out.scales, dispatch.height,
        columns, groups, scales == "power_of_two", num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def experts(
    x: Operand, routing: Routing, gate_up: LinearWeight, down: LinearWeight
) -> torch.Tensor:
    """x [T, C] as ``gate_up`` reads it -> y BF16 [T, C]."""
    tokens, num_experts = routing.logits.shape
    matrices = [ExpertMatrices.of(weight, num_experts) for weight in (gate_up, down)]
    has_kernel = grouped_back_end() == "deep_gemm" and all(m.suits_deep_gemm for m in matrices)
    height = -(-tokens // BLOCK) * BLOCK if tokens <= MASKED_TOKENS and has_kernel else None
    dispatch = make_dispatch(routing.experts, num_experts, height)
    outputs = _multiply(x, dispatch, gate_up, down, pads=False)[1]
    return combine(outputs, dispatch, routing.weights)


def experts_saving(
    x: LinearInput, routing: Routing, gate_up: LinearWeight, down: LinearWeight
) -> tuple[torch.Tensor, SavedExperts]:
    """The same bits, and what the backward reads; ``x.saved`` is x itself, BF16 [T, C]."""
    assert isinstance(x.saved, torch.Tensor)
    dispatch = make_dispatch(routing.experts, routing.logits.shape[1])
    made, outputs = _multiply(x.read, dispatch, gate_up, down, pads=True)
    saved = SavedExperts(x.saved, dispatch, made, outputs)
    return combine(outputs, dispatch, routing.weights), saved


def expert_site(weight: LinearWeight, num_experts: int) -> Site:
    """The site of one expert's matrix."""
    parts = weight.site.parts
    return replace(weight.site, parts=parts[: len(parts) // num_experts])


def _multiply(
    x: Operand, dispatch: Dispatch, gate_up: LinearWeight, down: LinearWeight, pads: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What gate_up and down give, BF16 [rows, 2 I] and [rows, C]."""
    num_experts = dispatch.counts.shape[0]
    wide = ExpertMatrices.of(gate_up, num_experts)
    made = grouped_gemm_nt(gather(x, dispatch, pads), wide, dispatch)
    scales = down.site.scales if down.site.forward == "e4m3" else None
    activation = swiglu_rows(made, dispatch, scales, pads)
    return made, grouped_gemm_nt(activation, ExpertMatrices.of(down, num_experts), dispatch)
