"""SwiGLU's gradient on a GPU: quantised as DGrad and WGrad read it, or in BF16 for a layer that stays in BF16.

With dy the gradient of y = silu(gate) * up, s = 1 / (1 + exp(-gate)) and silu = gate * s:

    d gate = dy * up * (s + silu * (1 - s))        d up = dy * silu

both rounded to BF16; the quantised copies are those of ``isobit.kernels.hopper.token_groups``: E4M3 in row groups, and transposed in token
groups.  This is the largest operand of the backward, 2 C numbers a token.  Tiles of 128 x 128 of three inputs would fill the registers
of a multiprocessor, which then loads, computes and stores in turn instead of at once.

So a program, in Gluon, takes its tile in strips.  Strips of 32 tokens are loaded and computed, leave as row groups, and wait in shared
memory in BF16; strips of 32 columns are then read from there across and leave as token groups.  A thread holds 16 numbers at a time, and
three programs share a multiprocessor, so that each hides behind the others.  The rows of shared memory are padded by 16 bytes every 16
rows: the 8 threads that read a column's 128 tokens find them in different banks, and vectors of 16 bytes stay aligned, which Triton does
not check.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isobit.kernels.hopper.quantise import QuantRows, magnitude_bits, to_e4m3
from isobit.kernels.hopper.token_groups import empty_tokens, tile_grid
from isobit.precision.formats import ScaleKind

WARPS = 8
STRIP = gl.constexpr(32)
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
BY_COLUMN = gl.constexpr(gl.BlockedLayout([16, 1], [8, 4], [1, 8], [0, 1]))
PADDED = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[16 * 128, 8]], [128, 128], [1, 0]))


@triton.jit
def _gate_gradient(dy, gate, up):
    """FP32 each -> BF16."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return (dy * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid))).to(tl.bfloat16)


@triton.jit
def _up_gradient(dy, gate):
    """FP32 each -> BF16."""
    return (dy * (gate * (1.0 / (1.0 + tl.exp(-gate))))).to(tl.bfloat16)


@triton.jit
def _swiglu_backward_kernel(DY, GATE_UP, OUT, C: tl.constexpr, WIDTH: tl.constexpr):
    """One program WIDTH columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < C
    dy = tl.load(DY + row * C + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * 2 * C + column, _gate_gradient(dy, gate, up), mask=inside)
    tl.store(OUT + row * 2 * C + C + column, _up_gradient(dy, gate), mask=inside)


# The same functions, compiled as parts of a Gluon kernel.
_to_e4m3, _magnitude_bits, _d_gate, _d_up = (gluon.jit(part.fn) for part in (to_e4m3, magnitude_bits, _gate_gradient, _up_gradient))


@gluon.jit
def _store_rows(d, VALUES, SCALES, scale_stride, row, inside, group, C: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """BF16 strip d, one group of 128 columns -> values [tokens, C] and scales [C/128, tokens]."""
    x = d.to(gl.float32)
    values, scales = _to_e4m3(x, gl.max(_magnitude_bits(x), 1)[:, None], POWER_OF_TWO)
    column = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, BY_ROW))
    gl.store(VALUES + row[:, None] * C + column[None, :], values, mask=inside[:, None])
    gl.store(SCALES + group.to(gl.int64) * scale_stride + row, gl.max(scales, 1), mask=inside)


@gluon.jit
def _store_tokens(tile, VALUES, SCALES, first, C: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """BF16 tile in shared memory, whose columns count from ``first`` -> values [C, Tp] and scales [Tp/128, C]."""
    token = gl.program_id(1) * 128 + gl.arange(0, 128, gl.SliceLayout(1, BY_COLUMN))
    for strip in gl.static_range(128 // STRIP):
        x = tile.slice(strip * STRIP, STRIP, 1).load(BY_COLUMN).to(gl.float32)
        values, scales = _to_e4m3(x, gl.max(_magnitude_bits(x), 0)[None, :], POWER_OF_TWO)
        column = first + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, BY_COLUMN))
        gl.store(VALUES + column.to(gl.int64)[None, :] * (gl.num_programs(1) * 128) + token[:, None], values)
        gl.store(SCALES + gl.program_id(1) * C + column, gl.max(scales, 0))


@gluon.jit(do_not_specialize=["tokens", "scale_stride"])
def _swiglu_backward_quantise_kernel(
    DY, GATE_UP, ROW_VALUES, ROW_SCALES, scale_stride, TOKEN_VALUES, TOKEN_SCALES, tokens,
    C: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """One program a tile of d gate and the same one of d up."""
    gates = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PADDED)
    ups = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PADDED)
    group = gl.program_id(0)
    column = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, BY_ROW))
    for strip in gl.static_range(128 // STRIP):
        row = gl.program_id(1).to(gl.int64) * 128 + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(1, BY_ROW))
        inside = row < tokens
        at = row[:, None] * (2 * C) + column[None, :]
        dy = gl.load(DY + row[:, None] * C + column[None, :], mask=inside[:, None], other=0.0).to(gl.float32)
        gate = gl.load(GATE_UP + at, mask=inside[:, None], other=0.0).to(gl.float32)
        up = gl.load(GATE_UP + C + at, mask=inside[:, None], other=0.0).to(gl.float32)
        d_gate = _d_gate(dy, gate, up)
        d_up = _d_up(dy, gate)
        gates.slice(strip * STRIP, STRIP, 0).store(d_gate)
        ups.slice(strip * STRIP, STRIP, 0).store(d_up)
        _store_rows(d_gate, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, group, 2 * C, POWER_OF_TWO)
        _store_rows(d_up, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, C // 128 + group, 2 * C, POWER_OF_TWO)
    _store_tokens(gates, TOKEN_VALUES, TOKEN_SCALES, group * 128, 2 * C, POWER_OF_TWO)
    _store_tokens(ups, TOKEN_VALUES, TOKEN_SCALES, C + group * 128, 2 * C, POWER_OF_TWO)


def swiglu_backward_quantise(dy: torch.Tensor, gate_up: torch.Tensor, scales: ScaleKind = "power_of_two") -> tuple[QuantRows, QuantRows]:
    """dy [T, C] and gate_up [T, 2 C], BF16, contiguous, C a multiple of 128 -> the gradient d of gate_up: d [T, 2 C] and d^T [2 C, Tp]."""
    assert dy.is_contiguous()
    count, columns = dy.shape
    rows, tokens = QuantRows.empty(*gate_up.shape, dy.device), empty_tokens(gate_up, 2 * columns)
    _swiglu_backward_quantise_kernel[tile_grid(count, columns)](
        dy, gate_up, rows.values, rows.scales, rows.scales.stride(1), tokens.values, tokens.scales, count,
        columns, scales == "power_of_two", num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return rows, tokens


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """dy [T, C] and gate_up [T, 2 C], BF16, contiguous -> the gradient of gate_up, BF16: what ``swiglu_backward_quantise`` quantises."""
    assert dy.is_contiguous()
    assert gate_up.is_contiguous()
    count, columns = dy.shape
    out = torch.empty_like(gate_up)
    width = min(1024, triton.next_power_of_2(columns))
    _swiglu_backward_kernel[(count, triton.cdiv(columns, width))](dy, gate_up, out, columns, width, num_warps=4, enable_fp_fusion=False)
    return out
