"""The linear layer in INT8, forward and backward, and in E4M3, forward: operands in the formats of
a site, and products.

Operands, and products in INT8, have the bits of ``isobit.kernels.spec.linear``.  What is not here
yet is refused by name: BF16, and gradients in E4M3.
"""

from typing import NoReturn

import torch

from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.kernels.triton import int8_backward
from isobit.kernels.triton.gemm import fp8_gemm_nt
from isobit.kernels.triton.int8 import int8_gemm_nt
from isobit.kernels.triton.int8_backward import Unbalanced
from isobit.kernels.triton.quantise import QuantRows, quantise_int8, quantise_rows
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor
from isobit.util.errors import ConfigError


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x BF16 [T, K] in INT8 or in 1x128 groups; saved as it is."""
    if save and site.wgrad != "int8":
        _refuse(site, "WGrad", site.wgrad)
    if site.forward == "int8":
        return LinearInput(quantise_int8(x), x if save else None)
    if site.forward != "e4m3":
        _refuse(site, "FProp", site.forward)
    return LinearInput(quantise_rows(x, site.scales, as_bytes=True), x if save else None)


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if isinstance(x, Int8Rows) and isinstance(weight.matrix, Int8Rows):
        return int8_gemm_nt(x, weight.matrix)
    if isinstance(x, QuantRows) and isinstance(weight.matrix, QuantTensor):
        return fp8_gemm_nt(x, weight.matrix)
    _refuse(weight.site, "FProp", weight.site.forward)


def output_gradient(dy: torch.Tensor, site: Site) -> OutputGradient:
    """dY BF16 [T, N] as DGrad and WGrad read it."""
    if site.dgrad != "int8":
        _refuse(site, "DGrad", site.dgrad)
    if site.wgrad != "int8":
        _refuse(site, "WGrad", site.wgrad)
    rows, amax = int8_backward.quantise_parts(dy, site.parts or (dy.shape[1],))
    return OutputGradient(rows, Unbalanced(dy, amax))


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    if not isinstance(dy, Int8Parts) or not isinstance(weight.matrix, Int8Rows):
        _refuse(weight.site, "DGrad", weight.site.dgrad)
    return int8_backward.dgrad(dy, int8_backward.transposed_parts(weight.matrix, dy.parts))


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor, site: Site) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    assert isinstance(x, torch.Tensor)
    if not len(x):
        return
    if (format := site.wgrad_of(len(x))) != "int8":
        _refuse(site, "WGrad", format)
    int8_backward.wgrad(*int8_backward.balanced_rows(Unbalanced.of(dy), x), grad)


def _refuse(site: Site, product: str, format: str | None) -> NoReturn:
    raise ConfigError(
        f"{site.name}: the portable Triton kernels have no {product} in {format} yet; the device "
        "'cpu' has, and here there are int8 forward and backward, and e4m3 forward"
    )
