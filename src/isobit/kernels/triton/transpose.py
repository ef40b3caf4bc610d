"""W^T as DGrad in E4M3 reads it, and in BF16 of experts: [K, N], each part of N in whole blocks.

    transpose_blocks     E4M3          -> the same bytes and scales
    transposed_weight    INT8          -> E4M3: multiplied by the Hadamard matrix H again (H H = n,
                                          by which its scales were divided), then quantised
    transpose_experts    any, stacked  -> likewise, of all experts

Products read both operands along the contraction, so W is transposed a layer at a time, rather than
stored twice.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.device_functions import padded_size, rotated, runs
from isobit.kernels.triton.grouped_gemm import ExpertMatrices
from isobit.kernels.triton.quantise import amax_bits, levels, to_e4m3
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    BLOCK,
    E4M3,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    num_blocks,
)


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
            to_values[:, run.first_block * BLOCK :], out.scales[:, run.first_block :],
            run.size, k,
            *out.values.shape[1:], *out.scales.shape[1:], num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _e4m3_kernel(
    VALUES, SCALES, OUT_VALUES, OUT_SCALES, N: tl.constexpr, PART: tl.constexpr, K: tl.constexpr,
    OUT_ROW: tl.constexpr, OUT_BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """One program a block of one matrix of N rows; the rows of a part go to as many of the OUT_ROW
    columns, with zeros up to a whole block.
    """
    of_part: tl.constexpr = (PART + 127) // 128
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    k = block_k.to(tl.int64) * 128 + tl.arange(0, 128)
    within = block_n % of_part * 128 + tl.arange(0, 128)
    n = matrix * N + block_n // of_part * PART + within
    if PART % 128 or K % 128:
        inside = (within < PART)[:, None] & (k < K)[None, :]
        values = tl.load(VALUES + n[:, None] * K + k[None, :], mask=inside, other=0)
        scales = tl.load(SCALES + n, mask=within < PART, other=0.0)
    else:
        values = tl.load(VALUES + n[:, None] * K + k[None, :])
        scales = tl.load(SCALES + n)
    x = rotated(values.to(tl.float32) * scales[:, None], 128, 128, LEVELS)
    bits = tl.max(amax_bits(x, 1)[:, None], 0, keep_dims=True)
    made, scale = to_e4m3(x, bits, POWER_OF_TWO, BYTES)
    made = made.to(tl.uint8, bitcast=True)
    if PART % 128 or K % 128:  # numbers beyond the matrix are NaN in a block that is not finite
        made = tl.where((within < PART)[:, None] & (k < K)[None, :], made, 0)
    to = block_n * 128 + tl.arange(0, 128)
    place = OUT_VALUES + (matrix * K + k)[:, None] * OUT_ROW + to[None, :]
    tl.store(place, tl.trans(made), mask=(k < K)[:, None])
    block = (matrix * ((K + 127) // 128) + block_k) * OUT_BLOCKS + block_n
    tl.store(OUT_SCALES + block + tl.zeros([1, 1], tl.int32), scale)


def transposed_e4m3(
    values: torch.Tensor,
    scales: torch.Tensor,
    part: int,
    kind: ScaleKind = "power_of_two",
    as_bytes: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Published matrices [E, N, K] with scales [E, N, 1] -> their numbers in E4M3 blocks that begin
    anew at each ``part`` of N, transposed: values [E, K, N in whole blocks] and FP32 scales [E,
    blocks of K, blocks of N]; ``as_bytes`` by integers alone, for every card.
    """
    count, n, k = values.shape
    blocks_k, blocks_n = num_blocks(k), n // part * num_blocks(part)
    made = torch.empty((count, k, blocks_n * BLOCK), dtype=E4M3, device=values.device)
    made_scales = torch.empty(
        (count, blocks_k, blocks_n), dtype=torch.float32, device=values.device
    )
    _turn(values, scales, made, made_scales, part, kind, as_bytes)
    return made, made_scales


def transposed_weight(
    weight: Int8Rows,
    parts: tuple[int, ...],
    kind: ScaleKind = "power_of_two",
    as_bytes: bool = False,
) -> QuantTensor:
    """A published weight [N, K] of these ``parts`` -> its numbers in E4M3 blocks, transposed: [K,
    ``padded_size``], as ``transpose_blocks`` lays them out.
    """
    n, k = weight.values.shape
    assert sum(parts) == n
    out = QuantTensor.empty_blocks(k, padded_size(parts), weight.values.device)
    for run in runs(parts):
        rows, columns = slice(run.first, run.first + run.size), run.first_block * BLOCK
        _turn(
            weight.values[None, rows], weight.scales[None, rows], out.values[None, :, columns:],
            out.scales[None, :, run.first_block :], run.size, kind, as_bytes,
        )  # fmt: skip
    return out


def _turn(
    values: torch.Tensor,
    scales: torch.Tensor,
    made: torch.Tensor,
    made_scales: torch.Tensor,
    part: int,
    kind: ScaleKind,
    as_bytes: bool,
) -> None:
    """INT8 [E, N, K] to E4M3 [E, K, N in whole blocks], perhaps columns of more."""
    count, n, k = values.shape
    _e4m3_kernel[(num_blocks(k), n // part * num_blocks(part), count)](
        values, scales, made.view(torch.uint8), made_scales, n, part, k, made.stride(1),
        made_scales.stride(1), levels(k), kind == "power_of_two", as_bytes,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _transpose_experts_kernel(
    VALUES, SCALES, OUT_VALUES, OUT_SCALES,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a block of one expert and its scale; N rows become COLUMNS, where zeros pad each
    part to whole blocks.  Bytes are handled as integers.
    """
    of_part: tl.constexpr = (PART + 127) // 128
    blocks_n: tl.constexpr = N // PART * of_part
    blocks_k: tl.constexpr = (K + 127) // 128
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    within = block_n % of_part * 128 + tl.arange(0, 128)
    n = block_n // of_part * PART + within
    to = block_n * 128 + tl.arange(0, 128)
    k = block_k * 128 + tl.arange(0, 128)
    place = VALUES + (expert * N + n)[:, None] * K + k[None, :]
    values = tl.load(place, mask=(within < PART)[:, None] & (k < K)[None, :], other=0)
    place = OUT_VALUES + (expert * K + k)[:, None] * COLUMNS + to[None, :]
    tl.store(place, tl.trans(values), mask=(k < K)[:, None] & (to < COLUMNS)[None, :])
    if SCALES is not None:
        scale = tl.load(SCALES + (expert * blocks_n + block_n) * blocks_k + block_k)
        tl.store(OUT_SCALES + (expert * blocks_k + block_k) * blocks_n + block_n, scale)


def transpose_experts(b: ExpertMatrices, site: Site, as_bytes: bool = False) -> ExpertMatrices:
    """[E, N, K] -> [E, K, N], each part of N in whole blocks; the same numbers and scales, or of
    INT8 what DGrad in E4M3 reads.
    """
    if b.is_int8:
        assert b.scales is not None
        made = transposed_e4m3(b.values, b.scales, b.part, site.scales, as_bytes)
        return ExpertMatrices(*made, b.values.shape[2])
    num_experts, n, k = b.values.shape
    is_quantised = b.scales is not None
    part = b.part if is_quantised else n
    blocks_n, blocks_k = n // part * num_blocks(part), num_blocks(k)
    columns = blocks_n * BLOCK if is_quantised else n
    dtype, word = (E4M3, torch.uint8) if is_quantised else (torch.bfloat16, torch.int16)
    values = torch.empty((num_experts, k, columns), dtype=dtype, device=b.values.device)
    scales = None
    if is_quantised:
        shape = (num_experts, blocks_k, blocks_n)
        scales = torch.empty(shape, dtype=torch.float32, device=b.values.device)
    _transpose_experts_kernel[(blocks_k, blocks_n, num_experts)](
        b.values.view(word), b.scales, values.view(word), scales, n, k, part, columns, num_warps=4
    )
    return ExpertMatrices(values, scales, k)
