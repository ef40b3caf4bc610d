"""The linear layer in INT8: its operands in the formats of a site, and its three products, with the
bits of ``isobit.kernels.spec.linear``.

What is not here yet is refused by name: operands in E4M3 and BF16.
"""

from typing import NoReturn

import torch

from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.kernels.triton import int8_backward
from isobit.kernels.triton.int8 import int8_gemm_nt
from isobit.kernels.triton.int8_backward import Unbalanced
from isobit.kernels.triton.quantise import quantise_int8
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows
from isobit.util.errors import ConfigError


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x BF16 [T, K] in INT8; saved as it is."""
    if site.forward != "int8":
        _refuse(site, "FProp", site.forward)
    return LinearInput(quantise_int8(x), x if save else None)


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if not isinstance(x, Int8Rows) or not isinstance(weight.matrix, Int8Rows):
        _refuse(weight.site, "FProp", weight.site.forward)
    return int8_gemm_nt(x, weight.matrix)


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


def _refuse(site: Site, product: str, format: str) -> NoReturn:
    raise ConfigError(
        f"{site.name}: the portable Triton kernels have no {product} in {format} yet, only in "
        "int8; choose device 'cpu', or precision 'int8' with dgrad and wgrad in int8"
    )
