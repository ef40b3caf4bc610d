"""Embedding, RMSNorm with the residual stream, SwiGLU and GeGLU, each with its backward.

**Embedding** reads rows of the published table; the gradient goes to the FP32 master.  The backward
is ``embedding_dense_backward``, which adds a token's rows in order.  The backward of ``table[ids]``
would be an accumulating ``index_put``, the one CPU operation whose sums vary from run to run.

**RMSNorm** with the residual stream: h = h + x, y = h / sqrt(mean(h^2) + eps) * w over the last
dimension, in FP32 from the input to the single rounding of y.  The gradient repeats bit for bit at
a fixed number of threads:

    n  = h / rms      s  = dy w      dh = d_residual + (s - n mean(s n)) / rms      dw += sum dy n

Rows of up to 4096 are summed in one piece, wider ones in pieces of 4096 that are added in ascending
order: torch splits the sum of a very wide row over threads, which would change its bits.

**SwiGLU** computes y = silu(gate) * up for fused rows (gate, up), with silu(x) = x / (1 + exp(-x))
in FP32.  torch's own ``silu`` and ``sigmoid`` round differently in the vectorised body and in the
scalar tail of a loop, so a token's bits would depend on its position; ``exp`` and division do not.
GeGLU has GELU by tanh for silu: since 1 + tanh(s / 2) = 2 / (1 + exp(-s)), it is x / (1 + exp(-s))
with s = 2 sqrt(2 / pi) (x + 0.044715 x^3).  gpt-oss clamps the gate from above and up on both
sides, and has y = x / (1 + exp(-a x)) * (up + 1); what is clamped has no gradient.
"""

import torch

from isobit.kernels.observing import rounded
from isobit.kernels.operands import (
    GELU_CUBIC,
    GELU_STEEP,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Gate,
    LinearInput,
    Normed,
    Operand,
    OutputGradient,
)
from isobit.kernels.spec.linear import input_saved, linear_input, output_gradient
from isobit.precision.flow import Site


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """int64 [T], table [V, C] -> [T, C] in the table's dtype."""
    return table.index_select(0, token_ids)


def embedding_backward(d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor) -> None:
    """d_hidden [T, C], int64 [T]: grad, FP32 [V, C], += the sum of each token's rows."""
    rows = d_hidden.float()
    grad.add_(torch.ops.aten.embedding_dense_backward(rows, token_ids, grad.shape[0], -1, False))


_WIDEST_SUM = 4096


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """FP32 or FP64 [..., C] contiguous -> [..., 1], in an order that depends on C alone."""
    if x.shape[-1] <= _WIDEST_SUM:
        return x.sum(-1, keepdim=True)
    pieces = [piece.sum(-1, keepdim=True) for piece in x.split(_WIDEST_SUM, -1)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., C], weight [C] -> y like x."""
    wide = x.float()
    return rounded(wide * inverse_rms(wide, epsilon) * weight.float(), x.dtype)


def add_rms_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    site: Site | None,
    save: bool = False,
    keep: bool = False,
) -> Normed:
    """The residual stream [T, C] after the addition, its norm (always returned, since it has been
    computed anyway), and the norm as ``site`` reads it.
    """
    h = h if x is None else h + x
    norm = rms_norm(h, weight, epsilon)
    return Normed(h, norm, None if site is None else linear_input(norm, site, save))


def rms_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    d_residual: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> torch.Tensor:
    """dy and h [..., C] -> dh in the dtype of h; grad, FP32 [C], += dw."""
    wide, dy = h.float(), dy.float()
    inverse = inverse_rms(wide, epsilon)
    normalised = wide * inverse
    if grad is not None:
        grad.add_((dy * normalised).reshape(-1, h.shape[-1]).sum(0))
    scaled = dy * weight.float()
    dh = (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) * inverse
    dh = dh.to(h.dtype)
    return dh if d_residual is None else d_residual + dh


def inverse_rms(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    """FP32 [..., C] -> 1 / sqrt(mean(x^2) + eps), [..., 1]."""
    return (row_sum(wide * wide) / wide.shape[-1] + epsilon).rsqrt()


def swiglu(gate_up: torch.Tensor, gate: Gate = "silu") -> torch.Tensor:
    """[T, 2 C] -> [T, C] in the dtype of the input."""
    x, up = gate_up.float().chunk(2, -1)
    return rounded(gated(x, up, gate), gate_up.dtype)


def gated(x: torch.Tensor, up: torch.Tensor, gate: Gate = "silu") -> torch.Tensor:
    """silu(x) * up, or with another function of the gate, in FP32."""
    if gate == "clamped_silu":
        x, up = _clamped(x, up)
    return x / (1.0 + torch.exp(-_exponent(x, gate))) * up


def _clamped(x: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1.0)


def _exponent(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    if gate == "gelu_tanh":
        return GELU_STEEP * (x + GELU_CUBIC * (x * x * x))
    return x if gate == "silu" else SWIGLU_ALPHA * x


def swiglu_input(
    gate_up: torch.Tensor, site: Site, save: bool = False, gate: Gate = "silu"
) -> LinearInput:
    """``swiglu`` as the linear ``site`` reads it."""
    return linear_input(swiglu(gate_up, gate), site, save)


def swiglu_saved(gate_up: torch.Tensor, site: Site, gate: Gate = "silu") -> Operand:
    """``swiglu`` as the linear's WGrad reads it."""
    return input_saved(swiglu(gate_up, gate), site)


def swiglu_backward(
    d_activation: torch.Tensor, gate_up: torch.Tensor, site: Site, gate: Gate = "silu"
) -> OutputGradient:
    """[T, C] and [T, 2 C] -> the gradient of ``gate_up``, as dY of the linear ``site``."""
    return output_gradient(swiglu_gradient(d_activation, gate_up, gate), site)


def swiglu_gradient(
    d_activation: torch.Tensor, gate_up: torch.Tensor, gate: Gate = "silu"
) -> torch.Tensor:
    """[T, C] and [T, 2 C] -> the gradient of ``gate_up``, in its dtype."""
    made = x, up = gate_up.float().chunk(2, -1)
    if gate == "clamped_silu":
        x, up = _clamped(x, up)
    dy = d_activation.float()
    sigmoid = 1.0 / (1.0 + torch.exp(-_exponent(x, gate)))
    active = x * sigmoid
    slope = active * (1.0 - sigmoid)
    if gate == "gelu_tanh":
        slope = slope * (GELU_STEEP * (1.0 + 3 * GELU_CUBIC * (x * x)))
    elif gate == "clamped_silu":
        slope = slope * SWIGLU_ALPHA
    d_gate, d_up = dy * up * (sigmoid + slope), dy * active
    if gate == "clamped_silu":
        d_gate.masked_fill_(made[0] > SWIGLU_LIMIT, 0.0)
        d_up.masked_fill_(made[1].abs() > SWIGLU_LIMIT, 0.0)
    return torch.cat([d_gate, d_up], -1).to(gate_up.dtype)
