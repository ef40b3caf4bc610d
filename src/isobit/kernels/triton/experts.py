"""A mixture of experts: the router, and the experts with their backward.

**Router.**  The logits x router^T are summed in FP32 by the GEMM of lm_head, whose rows
do not depend on the batch.  One program a token takes the softmax over all experts and chooses the
k largest, of equal ones the lower index.  A logit and its index become one integer that orders as
the choice does, so k distinct experts are found even among NaN.

**Experts**, forward and backward over the rows of all choices (``dispatch``):

    rows of the choices, by expert              d_out = w * dy, BF16;   d_w = <dy, out>, FP32
    gate_up = rows W_gate_up^T (+ bias)         down: dX, and dW of each expert over its rows
    activation, as down reads it                SwiGLU
    out = activation W_down^T (+ bias)          gate_up: dX and dW
    y[t] = sum over ranks of w * out            dx[t] = sum over ranks of dX

Sums over ranks are in FP32 in their order, rounded once.  Products are those of a back end
(``products``); a bias is added to them in FP32 and rounded.  Where it is faster, few tokens use the
masked layout; more tokens, and passes with a backward, use the contiguous one.  Both give the same
bits.  With a backward, padding is zeros, so the quantisers of the dense linear can take all rows in
groups of 128, none of which mixes two experts.  DGrad transposes the matrices a layer at a time.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl

from isobit.kernels.observing import is_observed, observe
from isobit.kernels.operands import ExpertGradients, Gate, LinearInput, LinearWeight, Operand
from isobit.kernels.routing import RouterLoss, Routing, logit_gradient
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows, combine, gather, make_dispatch
from isobit.kernels.triton.grouped_gemm import ExpertMatrices
from isobit.kernels.triton.int8_backward import transposed_parts
from isobit.kernels.triton.linear import input_saved, output_gradient, wgrad
from isobit.kernels.triton.pointwise import swiglu_backward, swiglu_backward_bf16, swiglu_saved
from isobit.kernels.triton.products import Products
from isobit.kernels.triton.quantise import (
    gated,
    levels,
    quantise_groups,
    scale_groups,
    warps_of_row,
    width_of_row,
)
from isobit.kernels.triton.transpose import transpose_experts
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, Int8Parts, Int8Rows, ScaleKind

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)


@dataclass(frozen=True, slots=True)
class SavedExperts:
    """Inputs of ``experts_backward``, in dispatched rows with zeros as padding."""

    x: torch.Tensor  # the input, BF16 [T, C]
    dispatch: Dispatch
    gate_up: torch.Tensor  # BF16 [rows, 2 I]
    outputs: torch.Tensor  # BF16 [rows, C]


@triton.jit(do_not_specialize=["height"])
def _swiglu_rows_kernel(
    GATE_UP, PLACES, VALUES, SCALES, height,
    C: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """One program GROUPS groups of one choice's row, gate before up; in BF16 without SCALES, in
    INT8 with LEVELS.
    """
    row = tl.load(PLACES + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * 128 + tl.arange(0, GROUPS * 128)
    inside = column < C
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
    as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
    y = gated(gate, up, GATE)
    if SCALES is None:
        tl.store(VALUES + row * C + column, y, mask=inside)
    else:
        values, scales = quantise_groups(y.to(tl.float32), GROUPS, POWER_OF_TWO, LEVELS, as_bytes)
        tl.store(VALUES + row * C + column, values, mask=inside)
        number: tl.constexpr = (C + 127) // 128 if LEVELS is None else 1
        group = scale_groups(first, GROUPS, LEVELS)
        place = SCALES + row // height * number * height + row % height
        tl.store(place + group.to(tl.int64) * height, scales, mask=group < number)


def swiglu_rows(
    gate_up: torch.Tensor,
    dispatch: Dispatch,
    scales: ScaleKind | Literal["int8"] | None,
    pads: bool,
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> GroupedRows:
    """BF16 [rows, 2 I] -> the activation as down reads it: in E4M3 with such scales, in INT8 or in
    BF16.  Padding is zeros with ``pads``; E4M3 is written ``as_bytes``.
    """
    columns, is_int8 = gate_up.shape[1] // 2, scales == "int8"
    format = "bf16" if scales is None else "int8" if is_int8 else "e4m3"
    out = GroupedRows.empty(dispatch, columns, gate_up.device, format)
    if pads:
        out.zero_()
    most = width_of_row(columns) // BLOCK
    groups = most if is_int8 else min(8, most)
    grid = (dispatch.places.numel(), triton.cdiv(columns, groups * BLOCK))
    values = out.values.view(torch.uint8) if as_bytes and format == "e4m3" else out.values
    _swiglu_rows_kernel[grid](
        gate_up, dispatch.places, values, out.scales, dispatch.height,
        columns, groups, scales == "power_of_two", levels(columns) if is_int8 else None,
        gate, num_warps=warps_of_row(groups * BLOCK), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def experts(
    products: type[Products],
    x: Operand,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    gate: Gate = "silu",
) -> torch.Tensor:
    """x [T, C] as ``gate_up`` reads it -> y BF16 [T, C]."""
    tokens, num_experts = routing.logits.shape
    matrices = (ExpertMatrices.of(weight, num_experts) for weight in (gate_up, down))
    height = products.masked_height(tokens, *matrices)
    dispatch = make_dispatch(routing.experts, num_experts, height)
    outputs = _multiply(products, x, routing, dispatch, gate_up, down, gate, pads=False)[1]
    return combine(outputs, dispatch, routing.weights)


def experts_saving(
    products: type[Products],
    x: LinearInput,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    gate: Gate = "silu",
) -> tuple[torch.Tensor, SavedExperts]:
    """The same bits, and what the backward reads; ``x.saved`` is x itself, BF16 [T, C]."""
    assert isinstance(x.saved, torch.Tensor)
    dispatch = make_dispatch(routing.experts, routing.logits.shape[1])
    made, outputs = _multiply(products, x.read, routing, dispatch, gate_up, down, gate, pads=True)
    saved = SavedExperts(x.saved, dispatch, made, outputs)
    return combine(outputs, dispatch, routing.weights), saved


def expert_site(weight: LinearWeight, num_experts: int) -> Site:
    """The site of one expert's matrix."""
    parts = weight.site.parts
    return replace(weight.site, parts=parts[: len(parts) // num_experts])


def _multiply(
    products: type[Products],
    x: Operand,
    routing: Routing,
    dispatch: Dispatch,
    gate_up: LinearWeight,
    down: LinearWeight,
    gate: Gate,
    pads: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of gate_up and down, BF16 [rows, 2 I] and [rows, C]."""
    num_experts = dispatch.counts.shape[0]
    wide = ExpertMatrices.of(gate_up, num_experts)
    made = products.grouped_gemm_nt(gather(x, dispatch, pads), wide, dispatch)
    made = _biased(made, gate_up, dispatch, routing.experts)
    scales = {"e4m3": down.site.scales, "int8": "int8"}.get(down.site.forward)
    activation = swiglu_rows(made, dispatch, scales, pads, gate, products.as_bytes)
    if is_observed() and scales == "int8":
        assert activation.scales is not None
        places = dispatch.places.long()
        scales_of = activation.scales.flatten()[places]
        observe(activation.values[places], down.site.name, "input", scales=scales_of)
    narrow = ExpertMatrices.of(down, num_experts)
    outputs = products.grouped_gemm_nt(activation, narrow, dispatch)
    return made, _biased(outputs, down, dispatch, routing.experts)


_BIASED = 1024  # columns of a program that adds biases
_SUMMED = tl.constexpr(32)  # rows whose running sums a program has


@triton.jit
def _bias_kernel(Y, BIAS, PLACES, EXPERTS, N: tl.constexpr, WIDTH: tl.constexpr):
    """One program WIDTH columns of one choice."""
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACES + choice).to(tl.int64)
    expert = tl.load(EXPERTS + choice)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < N
    y = tl.load(Y + row * N + column, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(BIAS + expert * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + column, y.to(tl.bfloat16), mask=inside)


def _biased(
    y: torch.Tensor, weight: LinearWeight, dispatch: Dispatch, chosen: torch.Tensor
) -> torch.Tensor:
    """Add the bias of each choice's expert to its row of BF16 [rows, N], in place."""
    if weight.bias is not None:
        columns = y.shape[1]
        _bias_kernel[(chosen.numel(), triton.cdiv(columns, _BIASED))](
            y, weight.bias, dispatch.places, chosen, columns, _BIASED, num_warps=4
        )
    return y


@triton.jit
def _bias_backward_kernel(
    D, STARTS, COUNTS, GRAD, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program WIDTH columns of one expert."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < N
    first = tl.load(STARTS + expert).to(tl.int64) * 128
    count = tl.load(COUNTS + expert)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        at = D + (first + row)[:, None] * N + column[None, :]
        read = (row < count)[:, None] & inside[None, :]
        total += tl.load(at, mask=read, other=0.0).to(tl.float32)
    at = GRAD + expert * N + column
    tl.store(at, tl.load(at, mask=inside, other=0.0) + tl.sum(total, 0), mask=inside)


def _add_bias_gradient(d: torch.Tensor, dispatch: Dispatch, grad: torch.Tensor) -> None:
    """Add the sum of each expert's rows of BF16 [rows, N] to its part of ``grad``, FP32 [E N]: in
    one order, by the number of its rows.
    """
    columns, width = d.shape[1], 128
    _bias_backward_kernel[(len(dispatch.counts), triton.cdiv(columns, width))](
        d, dispatch.starts, dispatch.counts, grad, columns, width, _SUMMED.value, num_warps=4
    )


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
    products: type[Products],
    dy: torch.Tensor,
    saved: SavedExperts,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    grads: ExpertGradients | None,
    gate: Gate = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy BF16 [T, C] -> dx BF16 [T, C], and the gradient of the routing's weights, FP32 [T, k]."""
    dispatch, num_experts = saved.dispatch, routing.logits.shape[1]
    as_bytes = products.as_bytes
    wide, narrow = (expert_site(weight, num_experts) for weight in (gate_up, down))
    d_outputs, d_weights = _weigh(dy, saved.outputs, dispatch, routing.weights)
    d, activation = output_gradient(d_outputs, narrow, as_bytes), None
    if grads is not None:
        if grads.down_bias is not None:
            _add_bias_gradient(d_outputs, dispatch, grads.down_bias)
        activation = swiglu_saved(saved.gate_up, narrow, gate, as_bytes)
        wgrad(products, d.tokens, activation, grads.down, narrow, dispatch)
    d_activation = _dgrad(products, d.rows, down, dispatch)
    del d_outputs, activation
    if grads is None or grads.gate_up_bias is None:
        d = swiglu_backward(d_activation, saved.gate_up, wide, gate, as_bytes)
        del d_activation
    else:
        del d
        d_made = swiglu_backward_bf16(d_activation, saved.gate_up, gate=gate)
        del d_activation
        _add_bias_gradient(d_made, dispatch, grads.gate_up_bias)
        d = output_gradient(d_made, wide, as_bytes)
        del d_made
    if grads is not None:
        x = input_saved(gather(saved.x, dispatch, pads=True).values, wide, as_bytes)
        wgrad(products, d.tokens, x, grads.gate_up, wide, dispatch)
        del x
    return combine(_dgrad(products, d.rows, gate_up, dispatch), dispatch), d_weights


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


def _dgrad(
    products: type[Products], dy: Operand, weight: LinearWeight, dispatch: Dispatch
) -> torch.Tensor:
    """dX = dY W of each row's expert, BF16 [rows, K]."""
    count = len(dispatch.counts)
    if isinstance(dy, Int8Parts):
        assert isinstance(weight.matrix, Int8Rows)
        turned = transposed_parts(weight.matrix, dy.parts, count)
        return products.int8_dgrad(dy, turned, dispatch)
    matrices = ExpertMatrices.of(weight, count)
    turned = transpose_experts(matrices, weight.site, products.as_bytes)
    return products.grouped_gemm_nt(GroupedRows.of(dy), turned, dispatch)


@triton.jit
def _order(logits, expert, NUM_EXPERTS: tl.constexpr, E: tl.constexpr):
    """FP32 logits -> int64 that fall as the choice does; zero loses its sign."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (rising.to(tl.int64) << 32) | (E - 1 - expert).to(tl.int64)
    return tl.where(expert < NUM_EXPERTS, key, -9223372036854775808)


@triton.jit
def _softmax(logits):
    """FP32; -inf beyond the last expert."""
    powers = tl.exp(logits - tl.max(logits, 0))
    return tl.div_rn(powers, tl.sum(powers, 0))


@triton.jit
def _choose_kernel(
    LOGITS, EXPERTS, WEIGHTS,
    NUM_EXPERTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One program a token; E and RANKS are NUM_EXPERTS and TOP_K as powers of two."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    at = LOGITS + token * NUM_EXPERTS + expert
    logits = tl.load(at, mask=expert < NUM_EXPERTS, other=float("-inf"))
    shares = _softmax(logits)
    keys = _order(logits, expert, NUM_EXPERTS, E)
    rank = tl.arange(0, RANKS)
    experts = tl.zeros([RANKS], tl.int32)
    weights = tl.zeros([RANKS], tl.float32)
    total = 0.0
    for j in range(TOP_K):
        best = tl.max(keys, 0)
        chosen = E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        weight = tl.sum(tl.where(expert == chosen, shares, 0.0), 0)
        experts = tl.where(rank == j, chosen, experts)
        weights = tl.where(rank == j, weight, weights)
        total += weight
        keys = tl.where(expert == chosen, -9223372036854775808, keys)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.zeros([RANKS], tl.float32) + total)
    tl.store(EXPERTS + token * TOP_K + rank, experts, mask=rank < TOP_K)
    tl.store(WEIGHTS + token * TOP_K + rank, weights, mask=rank < TOP_K)


def choose(logits: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """FP32 logits [T, E] -> the choice."""
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    _choose_kernel[(tokens,)](
        logits, experts, weights, num_experts, triton.next_power_of_2(num_experts), top_k,
        triton.next_power_of_2(top_k), renormalise, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return Routing(experts, weights, logits)


def route(
    products: type[Products],
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    renormalise: bool,
    bias: torch.Tensor | None = None,
) -> Routing:
    """x BF16 [T, C], the published router BF16 [E, C] -> the choice."""
    logits = products.bf16_gemm_nt(x, router, dtype=torch.float32)
    if bias is not None:
        logits.add_(bias)
    return choose(logits, top_k, renormalise)


@triton.jit
def _choose_backward_kernel(
    D_WEIGHTS, LOGITS, EXPERTS, WEIGHTS, D_LOGITS,
    NUM_EXPERTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One program a token.  With p the softmax, w the weights and d their gradients:

    renormalised   d logit_e = w_e (d_e - sum_j w_j d_j) for the chosen alone else           d
    logit_e = p_e (d_e - sum_j w_j d_j), d_e = 0 for the others
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    inside = expert < NUM_EXPERTS
    at = token * NUM_EXPERTS + expert
    factor = tl.zeros([E], tl.float32)
    if not RENORMALISE:
        factor = _softmax(tl.load(LOGITS + at, mask=inside, other=float("-inf")))
    d = tl.zeros([E], tl.float32)
    mean = 0.0
    for rank in range(TOP_K):
        chosen = tl.load(EXPERTS + token * TOP_K + rank)
        weight = tl.load(WEIGHTS + token * TOP_K + rank)
        slope = tl.load(D_WEIGHTS + token * TOP_K + rank)
        d = tl.where(expert == chosen, slope, d)
        if RENORMALISE:
            factor = tl.where(expert == chosen, weight, factor)
        mean += weight * slope
    tl.store(D_LOGITS + at, factor * (d - mean), mask=inside)


def route_backward(
    d_weights: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    router: torch.Tensor,
    renormalise: bool,
    loss: RouterLoss | None,
    grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """d_weights FP32 [T, k], x BF16 [T, C] -> the gradient of x, BF16; adds to grad, FP32 [E, C].
    Both products are in FP32: they are small.
    """
    d_logits = torch.empty_like(routing.logits)
    tokens, num_experts = d_logits.shape
    _choose_backward_kernel[(tokens,)](
        d_weights, routing.logits, routing.experts, routing.weights, d_logits,
        num_experts, triton.next_power_of_2(num_experts), d_weights.shape[1], renormalise,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    if loss is not None:
        d_logits += logit_gradient(routing, loss)
    if grad is not None:
        grad += torch.mm(d_logits.t(), x.float())  # one finished sum, however cuBLAS cuts it
    if bias_grad is not None:
        bias_grad += d_logits.sum(0)
    return torch.mm(d_logits, router.float()).to(x.dtype)
