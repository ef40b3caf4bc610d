"""The linear layer on Hopper: its operands in the formats of a site, and its three products.

    FProp   Y   = X W^T       ``isobit.kernels.hopper.gemm`` and ``int8``
    DGrad   dX  = dY W
    WGrad   dW += dY^T X
            dW[n, k] += sum over token groups t of
                            (sum_j dY^T[n, tj] X^T[k, tj]) * scale_y[n, t] * scale_x[k, t]

In E4M3, DGrad's dY is in 1x128 groups along N and W's 128x128 blocks are the forward's, both in
whole blocks of W's parts.  WGrad's operands are in groups of 128 tokens (``token_groups``), or in
BF16 (``precision.wgrad``, and layers in BF16).  Where both copies of an operand are needed, one
kernel reads it once.  A linear in INT8 has its backward in E4M3.

FP8 tensor cores read both operands along the contraction, so W is transposed here, a layer at a
time, rather than stored twice.  Each WGrad adds one finished sum to every element of the master's
FP32 gradient.  No bit of the backward has to agree with a rollout, so cuBLAS may choose its
algorithm; every result repeats at fixed shapes.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from isobit.kernels.hopper.device_functions import padded_size, runs
from isobit.kernels.hopper.gemm import (
    BackEnd,
    bf16_gemm_nt,
    call_deep_gemm,
    deep_gemm_or_triton,
    fp8_gemm_nt,
)
from isobit.kernels.hopper.int8 import int8_gemm_nt, transposed_weight
from isobit.kernels.hopper.quantise import (
    QuantRows,
    quantise_gradient,
    quantise_int8,
    quantise_rows,
)
from isobit.kernels.hopper.token_groups import gradient_both, quantise_both, quantise_tokens
from isobit.kernels.hopper.wgrad import triton_fp8_gemm_tn
from isobit.kernels.operands import LinearInput, LinearWeight, Operand, OutputGradient
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, Int8Rows, QuantTensor, ScaleKind, num_blocks

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


@triton.jit
def _transpose_kernel(
    VALUES, SCALES, OUT_VALUES, OUT_SCALES,
    N: tl.constexpr, K: tl.constexpr, OUT_ROW: tl.constexpr, OUT_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program a block and its scale, of N rows to N of the OUT_ROW columns, with zeros up to a
    whole block.  Bytes are handled as integers.
    """
    block_n = tl.program_id(1)
    block_k = tl.program_id(0)
    n = block_n.to(tl.int64) * 128 + tl.arange(0, 128)
    k = block_k.to(tl.int64) * 128 + tl.arange(0, 128)
    if N % 128 or K % 128:
        inside = (n < N)[:, None] & (k < K)[None, :]
        values = tl.load(VALUES + n[:, None] * K + k[None, :], mask=inside, other=0)
        kept = (k < K)[:, None]
        tl.store(OUT_VALUES + k[:, None] * OUT_ROW + n[None, :], tl.trans(values), mask=kept)
    else:
        values = tl.load(VALUES + n[:, None] * K + k[None, :])
        tl.store(OUT_VALUES + k[:, None] * OUT_ROW + n[None, :], tl.trans(values))
    tl.store(
        OUT_SCALES + block_k * OUT_BLOCKS + block_n,
        tl.load(SCALES + block_n * ((K + 127) // 128) + block_k),
    )


def transpose_blocks(weight: QuantTensor) -> QuantTensor:
    """A weight [N, K] in 128x128 blocks -> its transpose, the same bytes and scales: [K, N], or [K,
    ``padded_size``] with zeros behind each short block along N.
    """
    assert weight.granularity == "128x128"
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    n, k = weight.values.shape
    parts = weight.parts or (n,)
    out = QuantTensor.empty_blocks(k, padded_size(parts), weight.values.device)
    from_values, to_values = weight.values.view(torch.uint8), out.values.view(torch.uint8)
    for run in runs(parts):
        _transpose_kernel[(num_blocks(k), run.blocks)](
            from_values[run.first :], weight.scales[run.first_block :],
            to_values[:, run.first_block * BLOCK :], out.scales[:, run.first_block :], run.size, k,
            *out.values.shape[1:], *out.scales.shape[1:], num_warps=4,
        )  # fmt: skip
    return out


def fp8_gemm_nn(dy: QuantRows, weight: QuantTensor, scales: ScaleKind) -> torch.Tensor:
    """dY in 1x128 groups, padded as W's parts, W [N, K] in 128x128 blocks -> dX = dY W, BF16."""
    return fp8_gemm_nt(dy, transpose_blocks(weight), scales)


def bf16_gemm_nn(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dY [M, N], W [N, K], both BF16 -> dX = dY W, BF16 [M, K]."""
    return torch.mm(dy, weight)


def fp8_gemm_tn(
    dy_t: QuantRows, x_t: QuantRows, grad: torch.Tensor, back_end: BackEnd | None = None
) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, of dY^T [N, Tp] and X^T [K, Tp] in token groups."""
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    assert grad.shape == (dy_t.values.shape[0], x_t.values.shape[0])
    if (back_end or deep_gemm_or_triton()) == "triton":
        triton_fp8_gemm_tn(dy_t, x_t, grad)
        return
    left, right = (dy_t.values, dy_t.scales), (x_t.values, x_t.scales)
    call_deep_gemm("fp8_gemm_nt", left, right, grad, c=grad, recipe=(1, 1, BLOCK))


def bf16_gemm_tn(dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
    """grad, FP32 [N, K], += dY^T X, of dY [T, N] and X [T, K], BF16; never rounded to BF16."""
    torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, out=grad)


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x BF16 [T, K]: in 1x128 groups, in INT8 or as it is; saved in groups of 128 tokens or as it
    is.
    """
    if site.forward == "int8":
        return LinearInput(quantise_int8(x), input_saved(x, site) if save else None)
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
    if isinstance(x, Int8Rows):
        assert isinstance(weight.matrix, Int8Rows)
        return int8_gemm_nt(x, weight.matrix)
    if isinstance(x, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return fp8_gemm_nt(x, weight.matrix, weight.site.scales)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nt(x, weight.matrix)


def output_gradient(dy: torch.Tensor, site: Site) -> OutputGradient:
    """dY BF16 [T, N] as DGrad and WGrad read it."""
    if site.dgrad != "e4m3":
        return OutputGradient(dy, dy)
    parts = site.parts or (dy.shape[1],)
    if site.wgrad != "e4m3":
        return OutputGradient(quantise_gradient(dy, parts, site.scales), dy)
    return OutputGradient(*gradient_both(dy, parts, site.scales))


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    if isinstance(weight.matrix, Int8Rows):
        assert isinstance(dy, QuantRows)
        parts, scales = weight.site.parts or (len(weight.matrix.values),), weight.site.scales
        return fp8_gemm_nt(dy, transposed_weight(weight.matrix, parts, scales), scales)
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
