"""FProp and DGrad of experts on Hopper: every expert's matrix times the rows of its own tokens
(``isobit.kernels.triton.dispatch``), in one launch.

    Y[row, n] = sum_k A[row, k] B[expert of row, n, k]

An element is computed as by the dense GEMMs (``gemm``), in the same order along K, so an expert's
output for a token has the bits of a dense call with its matrix alone: DeepGEMM's masked, contiguous
and dense kernels and the Triton kernel here agree (tests/gpu/test_experts.py).  A choice between
them may therefore depend on anything.

DeepGEMM has one grid of blocks a matrix, so experts whose parts are not whole blocks, and BF16
sizes that are not whole tiles, go to Triton, and so does INT8.  Few tokens go to its masked kernel,
which skips empty tiles.  It has no grouped WGrad: that is ``wgrad`` and ``int8_backward``.
"""

import torch

from isobit.kernels.hopper.gemm import BackEnd, call_deep_gemm, deep_gemm_or_triton, stages
from isobit.kernels.hopper.sizes import MASKED_TOKENS
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows
from isobit.kernels.triton.gemm import Cut
from isobit.kernels.triton.grouped_gemm import ExpertMatrices, multiply, tile_of_rows
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


def masked_height(tokens: int, *matrices: ExpertMatrices) -> int | None:
    """Rows of each expert in the masked layout, for few tokens that DeepGEMM multiplies."""
    has_kernel = deep_gemm_or_triton() == "deep_gemm" and all(map(suits_deep_gemm, matrices))
    return -(-tokens // BLOCK) * BLOCK if tokens <= MASKED_TOKENS and has_kernel else None


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
