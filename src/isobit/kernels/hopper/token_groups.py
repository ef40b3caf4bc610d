"""Quantisers of WGrad's operands on a GPU: E4M3 in groups of 128 tokens of one column, written transposed.

    quantise_tokens            x                        -> x^T in token groups
    quantise_both              x                        -> x in row groups (DGrad's operand), and x^T in token groups, from one read of x
    swiglu_tokens              silu(gate) * up          -> y^T in token groups

The tensor cores want both operands along the tokens, so X [T, C] becomes values [C, Tp], Tp = T rounded up to 128, and scales
[C, Tp / 128]: a ``QuantRows`` of X^T, zeros beyond T.  The bytes are those of ``isobit.kernels.quantise.quantise_tokens``, and of
``quantise_rows`` for the row groups.  What is quantised is rounded to BF16 first.

One program holds a tile of 128 tokens and 128 columns, so it has both kinds of group whole; the tile's E4M3 bytes are turned over in
shared memory, and rows of both copies leave in whole lines.  A group's result depends on that group alone.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.quantise import QuantRows, _gated, magnitude_bits, to_e4m3
from isobit.precision.formats import BLOCK, ScaleKind

_WARPS = 8
_MANY_WARPS = 16  # where a thread could not hold its part of a tile otherwise: both copies, divided by FP32 scales
_REGISTERS = 128  # of a thread: 16 warps a multiprocessor, two programs of 8 or one of 16


@triton.jit
def _load_tile(X, row, inside, column, C: tl.constexpr):
    """BF16 [128, 128] of X [tokens, C], zeros beyond the tokens."""
    return tl.load(X + row[:, None] * C + column[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _store_rows(x, VALUES, SCALES, scale_stride, row, inside, group, C: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """FP32 tile x, one group of 128 columns -> values [tokens, C] and scales [C/128, tokens]."""
    values, scales = to_e4m3(x, tl.max(magnitude_bits(x), 1, keep_dims=True), POWER_OF_TWO)
    column = group * 128 + tl.arange(0, 128)
    tl.store(VALUES + row[:, None] * C + column[None, :], values, mask=inside[:, None])
    tl.store(SCALES + group.to(tl.int64) * scale_stride + row, tl.reshape(scales, [128]), mask=inside)


@triton.jit
def _store_tokens(x, VALUES, SCALES, column, C: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """FP32 tile x, one group of 128 tokens -> values [C, Tp] and scales [Tp/128, C]; the grid's second axis counts the groups."""
    values, scales = to_e4m3(x, tl.max(magnitude_bits(x), 0, keep_dims=True), POWER_OF_TWO)
    token = tl.program_id(1) * 128 + tl.arange(0, 128)
    place = column.to(tl.int64)[:, None] * (tl.num_programs(1) * 128) + token[None, :]
    tl.store(VALUES + place, tl.trans(values))
    tl.store(SCALES + tl.program_id(1) * C + column, tl.reshape(scales, [128]))


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def _quantise_kernel(
    X, ROW_VALUES, ROW_SCALES, scale_stride, TOKEN_VALUES, TOKEN_SCALES, tokens,
    C: tl.constexpr, BOTH: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program a tile."""
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = row < tokens
    x = _load_tile(X, row, inside, column, C).to(tl.float32)
    if BOTH:
        _store_rows(x, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, tl.program_id(0), C, POWER_OF_TWO)
    _store_tokens(x, TOKEN_VALUES, TOKEN_SCALES, column, C, POWER_OF_TWO)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu_tokens_kernel(GATE_UP, VALUES, SCALES, tokens, C: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """One program a tile of y: gate [row, column], up [row, C + column]."""
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = row < tokens
    gate = _load_tile(GATE_UP, row, inside, column, 2 * C)
    up = _load_tile(GATE_UP + C, row, inside, column, 2 * C)
    _store_tokens(_gated(gate, up).to(tl.float32), VALUES, SCALES, column, C, POWER_OF_TWO)


def quantise_tokens(x: torch.Tensor, scales: ScaleKind = "power_of_two") -> QuantRows:
    """[T, C] BF16, contiguous, C a multiple of 128 -> x^T in token groups, [C, Tp]."""
    out = empty_tokens(x, x.shape[1])
    _quantise(x, out, out, scales, both=False)
    return out


def quantise_both(x: torch.Tensor, scales: ScaleKind = "power_of_two") -> tuple[QuantRows, QuantRows]:
    """[T, C] BF16, contiguous, C a multiple of 128 -> x in row groups, [T, C], and x^T in token groups, [C, Tp]."""
    rows, tokens = QuantRows.empty(*x.shape, x.device), empty_tokens(x, x.shape[1])
    _quantise(x, rows, tokens, scales, both=True)
    return rows, tokens


def swiglu_tokens(gate_up: torch.Tensor, scales: ScaleKind = "power_of_two") -> QuantRows:
    """[T, 2 C] BF16, contiguous, gate before up, C a multiple of 128 -> (silu(gate) * up)^T in token groups, [C, Tp]."""
    count, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_tokens(gate_up, columns)
    _swiglu_tokens_kernel[tile_grid(count, columns)](
        gate_up, out.values, out.scales, count,
        columns, scales == "power_of_two", num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _quantise(x: torch.Tensor, rows: QuantRows, tokens: QuantRows, scales: ScaleKind, both: bool) -> None:
    count, columns = x.shape
    power_of_two = scales == "power_of_two"
    _quantise_kernel[tile_grid(count, columns)](
        x, rows.values, rows.scales, rows.scales.stride(1), tokens.values, tokens.scales, count,
        columns, both, power_of_two, num_warps=_warps(both, power_of_two), maxnreg=_REGISTERS,
    )  # fmt: skip


def _warps(both: bool, power_of_two: bool) -> int:
    return _MANY_WARPS if both and not power_of_two else _WARPS


def empty_tokens(source: torch.Tensor, columns: int) -> QuantRows:
    """Unwritten storage for a matrix [T, columns] in token groups, made from ``source`` [T, ...]."""
    assert source.dtype == torch.bfloat16
    assert source.is_contiguous()
    assert columns % BLOCK == 0
    return QuantRows.empty(columns, _groups(source.shape[0]) * BLOCK, source.device)


def tile_grid(tokens: int, columns: int) -> tuple[int, int]:
    """The grid: neighbours share tokens."""
    return columns // BLOCK, _groups(tokens)


def _groups(tokens: int) -> int:
    return -(-tokens // BLOCK)
