"""The linear layer: FProp, DGrad and WGrad in the formats of its site.

    FProp  Y  = X W^T    forward format; its rows must be the same bits for every batch: exact GEMM
                         (``isobit.kernels.spec.gemm``)
    DGrad  dX = dY W     E4M3: dY in 1x128 groups along N; W's 128x128 blocks are the forward's own,
                         read transposed
    WGrad  dW += dY^T X  E4M3: both operands in groups of 128 tokens, quantised straight from BF16

Y and dX are rounded to the format between operators, dW is FP32 and is added to the FP32 master's
gradient as one finished sum.  No bit of the backward has to agree with a rollout, so its GEMMs are
plain FP32 over the dequantised operands: they repeat at a fixed number of threads.
"""

import torch

from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.kernels.spec.e4m3 import decode_e4m3
from isobit.kernels.spec.gemm import fp8_gemm_nt, grid_gemm_nt
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.quantise import quantise_rows, quantise_tokens
from isobit.kernels.trace import rounded
from isobit.precision.flow import Site
from isobit.precision.formats import BLOCK
from isobit.precision.quant_tensor import QuantTensor, block_sizes


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x [T, K]: in 1x128 groups, or on the grid; saved in groups of 128 tokens, or as it is."""
    read = quantise_rows(x, site.scales) if site.forward == "e4m3" else snap_rows(x)
    return LinearInput(read, input_saved(x, site) if save else None)


def joined_rows(values: torch.Tensor, scales: torch.Tensor) -> QuantTensor:
    """E4M3 values [T, K] and FP32 scales, a row a group, [ceil(K / 128), T]."""
    return QuantTensor(values, scales.t().contiguous(), "1x128")


def input_saved(x: torch.Tensor, site: Site) -> Operand:
    """x [T, K] as WGrad reads it."""
    return quantise_tokens(x, site.scales) if site.wgrad == "e4m3" else x


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> [T, N]; the bits of a row depend on that row alone."""
    if isinstance(weight.matrix, QuantTensor):
        assert isinstance(x, QuantTensor)
        return rounded(fp8_gemm_nt(x, weight.matrix), torch.bfloat16)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return rounded(grid_gemm_nt(x, weight.matrix), x.dtype)


def output_gradient(dy: torch.Tensor, site: Site) -> OutputGradient:
    """dY [T, N] in 1x128 groups for DGrad, in groups of 128 tokens for WGrad, or as it is."""
    rows = quantise_rows(dy, site.scales, site.parts) if site.dgrad == "e4m3" else dy
    tokens = quantise_tokens(dy, site.scales) if site.wgrad == "e4m3" else dy
    return OutputGradient(rows, tokens)


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX [T, K] of dY [T, N], in the format between operators."""
    if isinstance(dy, QuantTensor):
        return (dequantise_rows(dy) @ dequantised(weight)).bfloat16()
    assert isinstance(dy, torch.Tensor)
    return (dy.float() @ dequantised(weight)).to(dy.dtype)


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    grad.add_(dequantise_tokens(dy).t() @ dequantise_tokens(x))


def dequantised(weight: LinearWeight) -> torch.Tensor:
    """FP32 [N, K]: the matrix that the forward multiplies with."""
    if isinstance(weight.matrix, torch.Tensor):
        return weight.matrix.float()
    assert isinstance(weight.matrix, QuantTensor)
    values = decode_e4m3(weight.matrix.values)
    return _by_column(values, weight.matrix.row_scales(), (values.shape[1],))


def dequantise_rows(x: QuantTensor) -> torch.Tensor:
    """1x128 groups -> FP32 [M, K]."""
    values = decode_e4m3(x.values)
    return _by_column(values, x.scales, x.parts or (values.shape[1],))


def _by_column(values: torch.Tensor, scales: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """``values`` [R, C], each times the scale [R, blocks of C] of its row and block, in place."""
    blocks = values.split(block_sizes(parts), 1)
    for block, scale in zip(blocks, scales.unbind(1), strict=True):
        block.mul_(scale[:, None])
    return values


def dequantise_tokens(x: Operand) -> torch.Tensor:
    """FP32 [T, C] of an operand of WGrad."""
    if isinstance(x, torch.Tensor):
        return x.float()
    values = decode_e4m3(x.values)
    for group, scale in zip(values.split(BLOCK), x.scales, strict=True):
        group.mul_(scale)
    return values
