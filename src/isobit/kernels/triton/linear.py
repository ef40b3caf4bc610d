"""The linear layer: its operands in the formats of a site, which Hopper takes from here, and its
three products on every card.

    FProp   Y   = X W^T       a row's bits do not depend on the number of rows
    DGrad   dX  = dY W        in E4M3, W's 128x128 blocks are the forward's, transposed
    WGrad   dW += dY^T X      FP32 sums of tokens in one order, added once

Operands, and products in INT8, have the bits of ``isobit.kernels.spec.linear``.  In E4M3, DGrad's
dY is in 1x128 groups along N, and WGrad's operands are in groups of 128 tokens (``token_groups``),
or in BF16.  Where both copies of an operand are needed, one kernel reads it once.  A linear in INT8
has DGrad in E4M3 and WGrad in BF16, or where the flow asks for it in INT8 (``int8_backward``).

E4M3 is written ``as_bytes``, by integers alone, for cards before sm_89; the products here read it
so (``e4m3``).
"""

import torch
import torch.nn.functional as F

from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.kernels.triton import int8_backward
from isobit.kernels.triton.gemm import bf16_gemm_nn, bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.triton.int8 import int8_gemm_nt
from isobit.kernels.triton.int8_backward import Unbalanced
from isobit.kernels.triton.quantise import (
    QuantRows,
    quantise_gradient,
    quantise_int8,
    quantise_rows,
)
from isobit.kernels.triton.token_groups import gradient_both, quantise_both, quantise_tokens
from isobit.kernels.triton.transpose import transpose_blocks, transposed_weight
from isobit.kernels.triton.wgrad import bf16_gemm_tn, fp8_gemm_tn
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor


def linear_input(
    x: torch.Tensor, site: Site, save: bool = False, as_bytes: bool = False
) -> LinearInput:
    """x BF16 [T, K]: in 1x128 groups, in INT8 or as it is; saved in groups of 128 tokens or as it
    is.
    """
    if site.forward == "int8":
        return LinearInput(quantise_int8(x), input_saved(x, site, as_bytes) if save else None)
    if save and site.wgrad == "e4m3":
        return LinearInput(*quantise_both(x, site.scales, as_bytes))
    read = quantise_rows(x, site.scales, as_bytes) if site.forward == "e4m3" else x
    return LinearInput(read, x if save else None)


def joined_rows(values: torch.Tensor, scales: torch.Tensor) -> QuantRows:
    """E4M3 values [T, K] and FP32 scales, a row a group, [ceil(K / 128), T]."""
    tokens = len(values)
    padding = -tokens % 4
    rows = F.pad(scales, (0, padding)) if padding else scales
    return QuantRows(values, rows.t()[:tokens])


def input_saved(x: torch.Tensor, site: Site, as_bytes: bool = False) -> Operand:
    """x BF16 [T, K] as WGrad reads it."""
    return quantise_tokens(x, site.scales, as_bytes) if site.wgrad == "e4m3" else x


def output_gradient(dy: torch.Tensor, site: Site, as_bytes: bool = False) -> OutputGradient:
    """dY BF16 [T, N] as DGrad and WGrad read it."""
    parts = site.parts or (dy.shape[1],)
    if site.dgrad == "int8":
        return of_int8_rows(dy, *int8_backward.quantise_parts(dy, parts), site, as_bytes)
    if site.dgrad != "e4m3":
        return OutputGradient(dy, dy)
    if site.wgrad != "e4m3":
        return OutputGradient(quantise_gradient(dy, parts, site.scales, as_bytes), dy)
    return OutputGradient(*gradient_both(dy, parts, site.scales, as_bytes))


def of_int8_rows(
    dy: torch.Tensor, rows: Int8Parts, amax: torch.Tensor, site: Site, as_bytes: bool = False
) -> OutputGradient:
    """dY in BF16, as DGrad reads it, and the bits of the largest numbers, int32 [parts, T]."""
    if site.wgrad == "int8":
        return OutputGradient(rows, Unbalanced(dy, amax))
    return OutputGradient(rows, input_saved(dy, site, as_bytes))


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if isinstance(x, Int8Rows):
        assert isinstance(weight.matrix, Int8Rows)
        return int8_gemm_nt(x, weight.matrix)
    if isinstance(x, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return fp8_gemm_nt(x, weight.matrix)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nt(x, weight.matrix)


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    matrix = weight.matrix
    if isinstance(dy, Int8Parts):
        assert isinstance(matrix, Int8Rows)
        return int8_backward.dgrad(dy, int8_backward.transposed_parts(matrix, dy.parts))
    if isinstance(dy, QuantRows):
        if isinstance(matrix, Int8Rows):
            parts = weight.site.parts or (len(matrix.values),)
            turned = transposed_weight(matrix, parts, weight.site.scales, as_bytes=True)
        else:
            assert isinstance(matrix, QuantTensor)
            turned = transpose_blocks(matrix)
        return fp8_gemm_nt(dy, turned)
    assert isinstance(dy, torch.Tensor)
    assert isinstance(matrix, torch.Tensor)
    return bf16_gemm_nn(dy, matrix)


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor, site: Site) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        fp8_gemm_tn(dy, x, grad)
        return
    assert isinstance(x, torch.Tensor)
    if not len(x):
        return
    if site.wgrad_of(len(x)) == "int8":
        int8_backward.wgrad(*int8_backward.balanced_rows(Unbalanced.of(dy), x), grad)
        return
    wide = dy.values if isinstance(dy, Unbalanced) else dy
    assert isinstance(wide, torch.Tensor)
    bf16_gemm_tn(wide, x, grad)
