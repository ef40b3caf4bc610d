"""The linear layer on Hopper: its operands in the formats of a site, and its three products.

    FProp   ``isobit.kernels.hopper.gemm``               rows whose bits do not depend on the batch
    DGrad, WGrad   ``isobit.kernels.hopper.linear_backward``

WGrad reads X in E4M3 groups of 128 tokens, transposed, or in BF16 (``precision.wgrad``, and layers
that stay in BF16).  Where both copies of an operand are wanted, one kernel reads it once.
"""

import torch
import torch.nn.functional as F

from isobit.kernels.hopper.gemm import bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.hopper.linear_backward import (
    bf16_gemm_nn,
    bf16_gemm_tn,
    fp8_gemm_nn,
    fp8_gemm_tn,
)
from isobit.kernels.hopper.quantise import QuantRows, quantise_gradient, quantise_rows
from isobit.kernels.hopper.token_groups import gradient_both, quantise_both, quantise_tokens
from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x BF16 [T, K]: in 1x128 groups or as it is; saved in groups of 128 tokens or as it is."""
    if save and site.wgrad == "e4m3":
        return LinearInput(*quantise_both(x, site.scales))
    read = quantise_rows(x, site.scales) if site.forward == "e4m3" else x
    return LinearInput(read, x if save else None)


def joined_rows(values: torch.Tensor, scales: torch.Tensor) -> QuantRows:
    """E4M3 values [T, K] and FP32 scales, a row a group, [ceil(K / 128), T]."""
    tokens = len(values)
    padding = -tokens % 4
    rows = F.pad(scales, (0, padding)) if padding else scales
    return QuantRows(values, rows.t()[:tokens])


def input_saved(x: torch.Tensor, site: Site) -> Operand:
    """x BF16 [T, K] as WGrad reads it."""
    return quantise_tokens(x, site.scales) if site.wgrad == "e4m3" else x


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if isinstance(x, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return fp8_gemm_nt(x, weight.matrix, weight.site.scales)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nt(x, weight.matrix)


def output_gradient(dy: torch.Tensor, site: Site) -> OutputGradient:
    """dY BF16 [T, N] as DGrad and WGrad read it."""
    if site.forward != "e4m3":
        return OutputGradient(dy, dy)
    parts = site.parts or (dy.shape[1],)
    if site.wgrad != "e4m3":
        return OutputGradient(quantise_gradient(dy, parts, site.scales), dy)
    return OutputGradient(*gradient_both(dy, parts, site.scales))


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    if isinstance(weight.matrix, QuantTensor):
        assert isinstance(dy, QuantRows)
        return fp8_gemm_nn(dy, weight.matrix, weight.site.scales)
    assert isinstance(dy, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nn(dy, weight.matrix)


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        fp8_gemm_tn(dy, x, grad)
        return
    assert isinstance(dy, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    bf16_gemm_tn(dy, x, grad)
