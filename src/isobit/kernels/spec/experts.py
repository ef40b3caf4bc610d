"""A mixture of experts: the routing of tokens, and the experts' MLPs.

**Routing** chooses the experts and weights of each token:

    logits    x router^T + bias      FP32: operands on the grid, exact block products
    p         softmax over all experts
    chosen    the k largest logits; of equal ones the lower expert comes first
    weights   p of the chosen, in the order of their ranks; if they are renormalised, divided by
              their sum (added in that order)

Every step works row by row in an order that depends on E and k alone, so a token's experts and
weights are batch invariant.  A NaN among the logits makes the weights NaN, and so the token's
output.  The choice has no gradient.  With d_w the gradient of the weights, that of the logits is

    p_e (d_p_e - sum_i p_i d_p_i)      where d_p is d_w at the chosen experts and 0 elsewhere, or
    w_j (d_w_j - sum_i w_i d_w_i)      renormalised: a softmax over the chosen experts alone

and the router's own losses add theirs (``isobit.kernels.routing``).

**The experts** each multiply the tokens that are routed to them:

    out_tj  = down_e(silu(gate) * up),   (gate, up) = gate_up_e(x_t),    e the token's expert of
                                                                         rank j
    y_t     = sum over j of w_tj out_tj              FP32, in the order of the ranks, rounded once

The matrices of expert e are rows [e N, (e + 1) N) of the fused ones.  Its products are those of a
linear (``isobit.kernels.spec.linear``) over its tokens in ascending order; their bits do not depend
on how many tokens there are.  The backward, with d_y the gradient of y:

    d_out_tj = w_tj d_y_t          in the format between operators, then dY of expert e's down
    d_w_tj   = sum_c d_y_tc out_tjc                  FP32
    d_x_t    = sum over j of expert e's dX           FP32, in the order of the ranks, rounded once

WGrad's operands are quantised from the format between operators, in groups of 128 of an expert's
tokens; in INT8 an expert's tokens share the scales of its rows, and none of others.  Each expert
adds one finished sum to its rows of the gradients; an expert without tokens adds nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from isobit.kernels.observing import is_observed, observe, rounded
from isobit.kernels.operands import ExpertGradients, Gate, LinearInput, LinearWeight, Operand
from isobit.kernels.routing import RouterLoss, Routing, logit_gradient
from isobit.kernels.spec.linear import (
    dgrad,
    grid_gemm_nt,
    input_saved,
    linear,
    output_gradient,
    wgrad,
)
from isobit.kernels.spec.pointwise import row_sum, swiglu_gradient, swiglu_input, swiglu_saved
from isobit.kernels.spec.quantise import snap_rows
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import E4M3, Int8Rows, QuantTensor


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    renormalise: bool,
    bias: torch.Tensor | None = None,
) -> Routing:
    """x [T, C], the published router [E, C] and bias [E] -> the experts and weights of each
    token.
    """
    logits = grid_gemm_nt(snap_rows(x), snap_rows(router))
    if bias is not None:
        logits.add_(bias.float())
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = _softmax(logits).gather(1, experts)
    if renormalise:
        weights = weights / sum_of_ranks(weights)
    return Routing(experts.int(), weights, logits)


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
    """The gradients of the weights, FP32 [T, k], and of the losses -> that of x [T, C]; adds the
    router's to ``grad``, FP32 [E, C], and its bias's to ``bias_grad``, FP32 [E].
    """
    chosen = routing.experts.long()
    if renormalise:
        d = routing.weights * (d_weights - (routing.weights * d_weights).sum(-1, keepdim=True))
        d_logits = torch.zeros_like(routing.logits).scatter_(1, chosen, d)
    else:
        p = _softmax(routing.logits)
        d_p = torch.zeros_like(p).scatter_(1, chosen, d_weights)
        d_logits = p * (d_p - (p * d_p).sum(-1, keepdim=True))
    if loss is not None:
        d_logits = d_logits + logit_gradient(routing, loss)
    if grad is not None:
        grad.add_(d_logits.t() @ x.float())
    if bias_grad is not None:
        bias_grad.add_(d_logits.sum(0))
    return (d_logits @ router.float()).to(x.dtype)


def sum_of_ranks(values: torch.Tensor) -> torch.Tensor:
    """FP32 [T, k, ...] -> [T, 1, ...], added one rank after another."""
    total = values[:, :1]
    for rank in range(1, values.shape[1]):
        total = total + values[:, rank : rank + 1]
    return total


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """FP32 [T, E], with each row summed in one order."""
    raised = torch.exp(logits - logits.amax(-1, keepdim=True))
    return raised / row_sum(raised)


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert and the choices that fell on it."""

    choices: torch.Tensor
    """int64, ascending: t k + j of token t's expert of rank j."""
    tokens: torch.Tensor
    """int64, ascending: the token t of each choice."""
    gate_up: LinearWeight
    down: LinearWeight
    gate_up_rows: slice
    """The expert's rows of the fused matrix, like ``down_rows``."""
    down_rows: slice


@dataclass(frozen=True, slots=True)
class SavedExperts:
    x: torch.Tensor
    """The input [T, C]."""
    gate_up: tuple[torch.Tensor, ...]
    """[n, 2 I] for each expert that has tokens."""
    outputs: torch.Tensor
    """[T, k, C]"""


def experts(
    x: Operand, routing: Routing, gate_up: LinearWeight, down: LinearWeight, gate: Gate = "silu"
) -> torch.Tensor:
    """x [T, C] as ``gate_up`` reads it -> y [T, C]."""
    return _weighted_sum(_outputs(x, routing, gate_up, down, gate)[0], routing)


def experts_saving(
    x: LinearInput,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    gate: Gate = "silu",
) -> tuple[torch.Tensor, SavedExperts]:
    """The same bits as ``experts``, and what the backward reads; ``x.saved`` is the input itself
    [T, C].
    """
    assert isinstance(x.saved, torch.Tensor)
    outputs, made = _outputs(x.read, routing, gate_up, down, gate)
    return _weighted_sum(outputs, routing), SavedExperts(x.saved, tuple(made), outputs)


def experts_backward(
    dy: torch.Tensor,
    saved: SavedExperts,
    routing: Routing,
    gate_up: LinearWeight,
    down: LinearWeight,
    grads: ExpertGradients | None,
    gate: Gate = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy [T, C] -> dx [T, C], and the gradient of the routing's weights, FP32 [T, k]."""
    weights, d_inputs = routing.weights.flatten(), torch.empty_like(saved.outputs).flatten(0, 1)
    gate_up, down = (_of_tokens(weight, len(dy)) for weight in (gate_up, down))
    chosen = experts_with_tokens(routing, gate_up, down)
    for expert, made in zip(chosen, saved.gate_up, strict=True):
        d_output = (weights[expert.choices, None] * dy[expert.tokens].float()).to(dy.dtype)
        d = output_gradient(d_output, expert.down.site)
        if grads is not None:
            activation = swiglu_saved(made, expert.down.site, gate)
            wgrad(d.tokens, activation, grads.down[expert.down_rows], expert.down.site)
        d_made = swiglu_gradient(dgrad(d.rows, expert.down), made, gate)
        d = output_gradient(d_made, expert.gate_up.site)
        if grads is not None:
            x = input_saved(saved.x[expert.tokens], expert.gate_up.site)
            wgrad(d.tokens, x, grads.gate_up[expert.gate_up_rows], expert.gate_up.site)
            if grads.gate_up_bias is not None and grads.down_bias is not None:
                grads.gate_up_bias[expert.gate_up_rows] += d_made.float().sum(0)
                grads.down_bias[expert.down_rows] += d_output.float().sum(0)
        d_inputs[expert.choices] = dgrad(d.rows, expert.gate_up)
    d_weights = row_sum(dy.float()[:, None] * saved.outputs.float())[..., 0]
    d_x = sum_of_ranks(d_inputs.view_as(saved.outputs).float())[:, 0]
    return d_x.to(dy.dtype), d_weights


def _of_tokens(weight: LinearWeight, tokens: int) -> LinearWeight:
    """The weight with the format of WGrad that all experts have in a micro-batch."""
    return replace(weight, site=replace(weight.site, wgrad=weight.site.wgrad_of(tokens)))


def experts_with_tokens(
    routing: Routing, gate_up: LinearWeight, down: LinearWeight
) -> Iterator[Expert]:
    """The experts that any token chose, in ascending order."""
    count, top_k = routing.logits.shape[1], routing.experts.shape[1]
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=count).tolist()
    for index, choices in enumerate(order.split(sizes)):
        if choices.numel():
            one_gate_up, gate_up_rows = one_expert(gate_up, index, count)
            one_down, down_rows = one_expert(down, index, count)
            tokens = choices // top_k
            yield Expert(choices, tokens, one_gate_up, one_down, gate_up_rows, down_rows)


def one_expert(weight: LinearWeight, index: int, count: int) -> tuple[LinearWeight, slice]:
    """A view of the matrix of expert ``index``, of ``count`` stacked along the rows; and its
    rows.
    """
    matrix, parts = weight.matrix, len(weight.site.parts) // count
    site = replace(weight.site, parts=weight.site.parts[parts * index : parts * (index + 1)])
    rows = _span(sum(weight.site.parts), index, count)
    bias = None if weight.bias is None else weight.bias[rows]
    if isinstance(matrix, torch.Tensor):
        return LinearWeight(site, matrix[rows], bias), rows
    if isinstance(matrix, Int8Rows):
        return LinearWeight(site, matrix.rows(rows.start, rows.stop), bias), rows
    assert isinstance(matrix, QuantTensor)
    blocks = _span(len(matrix.scales), index, count)
    own = QuantTensor(matrix.values[rows], matrix.scales[blocks], "128x128", site.parts)
    return LinearWeight(site, own, bias), rows


def _span(rows: int, index: int, count: int) -> slice:
    each = rows // count
    return slice(each * index, each * (index + 1))


def _outputs(
    x: Operand, routing: Routing, gate_up: LinearWeight, down: LinearWeight, gate: Gate
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of each token's experts [T, k, C], and gate and up of each expert that has
    tokens.
    """
    tokens, top_k = routing.experts.shape
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    columns = (x if isinstance(x, torch.Tensor) else x.values).shape[1]
    outputs, made = torch.empty(tokens * top_k, columns, dtype=dtype), list[torch.Tensor]()
    inputs = list[tuple[torch.Tensor, Operand]]()
    for expert in experts_with_tokens(routing, gate_up, down):
        made.append(_biased(linear(_rows(x, expert.tokens), expert.gate_up), expert.gate_up))
        activation = swiglu_input(made[-1], expert.down.site, gate=gate)
        outputs[expert.choices] = _biased(linear(activation.read, expert.down), expert.down)
        if is_observed():
            inputs.append((expert.choices, activation.read))
    _observe_inputs(inputs, down.site, tokens)
    return outputs.view(tokens, top_k, columns), made


def _biased(y: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Add the bias in place: a sum in FP32, rounded once."""
    return y if weight.bias is None else y.add_(weight.bias)


def _observe_inputs(inputs: list[tuple[torch.Tensor, Operand]], site: Site, tokens: int) -> None:
    """Show what down reads in INT8: [T, k, I], with scales [T, k]."""
    rows = [x for _, x in inputs if isinstance(x, Int8Rows)]
    if rows:
        order = torch.cat([choices for choices, _ in inputs]).argsort()
        values, scales = (
            torch.cat(every)[order]
            for every in zip(*((x.values, x.scales) for x in rows), strict=True)
        )
        wide = values.view(tokens, -1, values.shape[1])
        observe(wide, site.name, "input", scales=scales.view(tokens, -1))


def _rows(x: Operand, index: torch.Tensor) -> Operand:
    if isinstance(x, torch.Tensor):
        return x.index_select(0, index)
    if isinstance(x, Int8Rows):
        return Int8Rows(x.values.index_select(0, index), x.scales.index_select(0, index))
    assert isinstance(x, QuantTensor)
    values = x.values.view(torch.uint8).index_select(0, index).view(E4M3)
    return QuantTensor(values, x.scales.index_select(0, index), x.granularity)


def _weighted_sum(outputs: torch.Tensor, routing: Routing) -> torch.Tensor:
    weighted = routing.weights[..., None] * outputs.float()
    return rounded(sum_of_ranks(weighted)[:, 0], outputs.dtype)
