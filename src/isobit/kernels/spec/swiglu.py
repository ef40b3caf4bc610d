"""SwiGLU: y = silu(gate) * up for the fused rows (gate, up), with silu(x) = x / (1 + exp(-x)) in
FP32.

torch's own ``silu`` and ``sigmoid`` round differently in the vector body and in the scalar tail of
a loop, so a token's bits would depend on its place; ``exp`` and the division do not.
"""

import torch

from isobit.kernels.operands import LinearInput, Operand, OutputGradient
from isobit.kernels.spec.linear import input_saved, linear_input, output_gradient
from isobit.kernels.trace import rounded
from isobit.precision.flow import Site


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 C] -> [T, C] in the dtype of the input."""
    return rounded(gated(*gate_up.float().chunk(2, -1)), gate_up.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """FP32 silu(gate) * up."""
    return gate / (1.0 + torch.exp(-gate)) * up


def swiglu_input(gate_up: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """``swiglu`` as the linear ``site`` reads it."""
    return linear_input(swiglu(gate_up), site, save)


def swiglu_saved(gate_up: torch.Tensor, site: Site) -> Operand:
    """``swiglu`` as the linear's WGrad reads it."""
    return input_saved(swiglu(gate_up), site)


def swiglu_backward(
    d_activation: torch.Tensor, gate_up: torch.Tensor, site: Site
) -> OutputGradient:
    """[T, C] and [T, 2 C] -> the gradient of ``gate_up``, as dY of the linear ``site``."""
    gate, up = gate_up.float().chunk(2, -1)
    dy = d_activation.float()
    sigmoid = 1.0 / (1.0 + torch.exp(-gate))
    silu = gate * sigmoid
    d_gate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    return output_gradient(torch.cat([d_gate, dy * silu], -1).to(gate_up.dtype), site)
