"""SwiGLU on Hopper: the activation as the linear behind it reads it, and its gradient, each in one
kernel (``quantise``, ``token_groups``, ``swiglu_backward``).
"""

import torch

from isobit.kernels.hopper.linear import linear_input, output_gradient
from isobit.kernels.hopper.quantise import swiglu, swiglu_quantise
from isobit.kernels.hopper.swiglu_backward import swiglu_backward_bf16, swiglu_backward_quantise
from isobit.kernels.hopper.token_groups import swiglu_both, swiglu_tokens
from isobit.kernels.operands import LinearInput, Operand, OutputGradient
from isobit.precision.flow import Site


def swiglu_input(gate_up: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """gate_up BF16 [T, 2 C] -> ``swiglu`` as the linear ``site`` reads it."""
    if save and site.wgrad == "e4m3":
        return LinearInput(*swiglu_both(gate_up, site.scales))
    if not save and site.forward == "e4m3":
        return LinearInput(swiglu_quantise(gate_up, site.scales))
    return linear_input(swiglu(gate_up), site, save)


def swiglu_saved(gate_up: torch.Tensor, site: Site) -> Operand:
    """``swiglu`` as the linear's WGrad reads it."""
    return swiglu_tokens(gate_up, site.scales) if site.wgrad == "e4m3" else swiglu(gate_up)


def swiglu_backward(
    d_activation: torch.Tensor, gate_up: torch.Tensor, site: Site
) -> OutputGradient:
    """[T, C] and [T, 2 C], BF16 -> the gradient of ``gate_up``, as dY of the linear ``site``."""
    if site.forward == "e4m3" and site.wgrad == "e4m3":
        return OutputGradient(*swiglu_backward_quantise(d_activation, gate_up, site.scales))
    return output_gradient(swiglu_backward_bf16(d_activation, gate_up), site)
