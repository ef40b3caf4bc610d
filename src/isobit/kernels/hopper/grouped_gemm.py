"""The GEMMs of experts: every expert's matrix times the rows of its own tokens
(``isobit.kernels.triton.dispatch``), in one launch.

    FProp, DGrad   Y[row, n] = sum_k A[row, k] B[expert of row, n, k]
    WGrad          grad[e, n, k] += sum over expert e's rows of A[row, n] B[row, k]

An element is computed as by the dense GEMMs (``gemm``), in the same order along K, so an expert's
output for a token has the bits of a dense call with its matrix alone: DeepGEMM's masked, contiguous
and dense kernels and the Triton kernel here agree (tests/gpu/test_experts.py).  A choice between
them may therefore depend on anything.

DeepGEMM has one grid of blocks a matrix, so experts whose parts are not whole blocks, and BF16
sizes that are not whole tiles, go to Triton, and so does INT8.  It has no grouped WGrad: that is
``isobit.kernels.hopper.linear`` in E4M3, ``int8_backward`` in INT8, and Triton's in BF16.
"""

import torch

from isobit.kernels.hopper import int8_backward
from isobit.kernels.hopper.gemm import BackEnd, call_deep_gemm, deep_gemm_or_triton, stages
from isobit.kernels.hopper.linear import triton_fp8_gemm_tn
from isobit.kernels.operands import Operand
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows
from isobit.kernels.triton.gemm import Cut
from isobit.kernels.triton.grouped_gemm import ExpertMatrices, multiply, tile_of_rows
from isobit.kernels.triton.int8_backward import Unbalanced, balanced_rows
from isobit.kernels.triton.quantise import QuantRows
from isobit.kernels.triton.wgrad import bf16_gemm_tn
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK

_WHOLE = 64  # DeepGEMM's BF16 tiles


def suits_deep_gemm(b: ExpertMatrices) -> bool:
    """Whether DeepGEMM takes its sizes."""
    _, n, k = b.values.shape
    if b.is_int8:
        return False
    if b.scales is None:
        return n % _WHOLE == 0 and k % _WHOLE == 0
    return b.part == n or b.part % BLOCK == 0


def grouped_gemm_nt(
    a: GroupedRows,
    b: ExpertMatrices,
    dispatch: Dispatch,
    back_end: BackEnd | None = None,
) -> torch.Tensor:
    """A [rows, K] times each expert's B^T -> BF16 [rows, N].  Padding rows are undefined, but zeros
    give zeros, and rows of no expert are zeros.
    """
    num_experts, n, k = b.values.shape
    rows = dispatch.rows
    out = torch.empty((rows, n), dtype=torch.bfloat16, device=a.values.device)
    if (back_end or deep_gemm_or_triton()) == "triton" or not suits_deep_gemm(b):
        block_m, warps = tile_of_rows(dispatch, num_experts)
        cut = Cut(block_m, warps, stages(block_m, a.values.element_size()))
        multiply(a, b, dispatch, out, cut)
        return out
    if not dispatch.is_masked:
        if b.scales is None:
            left, right, name = a.values, b.values, "m_grouped_bf16_gemm_nt_contiguous"
        else:
            assert a.scales is not None
            left, right = (a.values, a.scales[0].t()), (b.values, b.scales)
            name = "m_grouped_fp8_gemm_nt_contiguous"
        call_deep_gemm(name, left, right, out, dispatch.experts)
        return out
    values = a.values.view(num_experts, dispatch.height, k)
    if b.scales is None:
        left, right, name = values, b.values, "m_grouped_bf16_gemm_nt_masked"
    else:
        assert a.scales is not None
        left, right = (values, a.scales.transpose(1, 2)), (b.values, b.scales)
        name = "fp8_m_grouped_gemm_nt_masked"
    grid = out.view(num_experts, dispatch.height, n)
    expected = max(1, dispatch.places.numel() // num_experts)
    call_deep_gemm(name, left, right, grid, dispatch.counts, expected)
    return out


def grouped_gemm_tn(
    dy: Operand, x: Operand, grad: torch.Tensor, site: Site, dispatch: Dispatch
) -> None:
    """grad, FP32 [E N, K], contiguous, += dY^T X of each expert's rows, padded with zeros to whole
    groups of 128: dY [rows, N] and X [rows, K] in BF16, or dY^T and X^T in token groups.
    """
    assert grad.is_contiguous()
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        triton_fp8_gemm_tn(dy, x, grad, dispatch.starts)
        return
    assert isinstance(x, torch.Tensor)
    if site.wgrad_of(len(dispatch.places)) == "int8":
        sides = balanced_rows(Unbalanced.of(dy), x, dispatch)
        int8_backward.wgrad(*sides, grad, dispatch)
        return
    dy = dy.values if isinstance(dy, Unbalanced) else dy
    assert isinstance(dy, torch.Tensor)
    bf16_gemm_tn(dy, x, grad, starts=dispatch.starts, stages=4)
