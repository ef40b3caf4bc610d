"""SwiGLU's gradient, quantised as DGrad and WGrad read it, or in BF16 for a layer in BF16.

With dy the gradient of y = silu(gate) * up, s = 1 / (1 + exp(-gate)) and silu = gate * s:

    d gate = dy * up * (s + silu * (1 - s))        d up = dy * silu

both rounded to BF16.  This is the largest operand of the backward, 2 C numbers a token.  A program
computes a tile of both gradients in strips, with the functions of
``isobit.kernels.hopper.token_groups``; three inputs and two tiles in shared memory allow three
programs a multiprocessor.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isobit.kernels.hopper.device_functions import padded_size
from isobit.kernels.hopper.quantise import QuantRows, four_sigmoids
from isobit.kernels.hopper.token_groups import (
    BY_ROW,
    PADDED,
    STRIP,
    WARPS,
    empty_tokens,
    load_rows,
    store_rows,
    store_tokens,
    tile_grid,
    widen,
)
from isobit.precision.quant_tensor import ScaleKind


@triton.jit
def _gate_gradient(dy, gate, up):
    """FP32 each -> BF16."""
    sigmoid = 0.25 * four_sigmoids(gate)
    return (dy * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid))).to(tl.bfloat16)


@triton.jit
def _up_gradient(dy, gate):
    """FP32 each -> BF16."""
    return (dy * (gate * (0.25 * four_sigmoids(gate)))).to(tl.bfloat16)


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
_d_gate, _d_up = (gluon.jit(part.fn) for part in (_gate_gradient, _up_gradient))


@gluon.jit(do_not_specialize=["tokens", "scale_stride"])
def _swiglu_backward_quantise_kernel(
    DY, GATE_UP, ROW_VALUES, ROW_SCALES, scale_stride, TOKEN_VALUES, TOKEN_SCALES, tokens,
    C: gl.constexpr, WHOLE: gl.constexpr, COLUMNS: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """One program a tile of d gate and the same tile of d up.

    The gradient is [tokens, 2 C]: d gate, then d up.  In row groups both are padded with zeros to
    WHOLE columns; token scales lie COLUMNS apart.
    """
    gates = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PADDED)
    ups = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PADDED)
    group = gl.program_id(0)  # of columns; axis 1 counts groups of tokens

    # Strips of 32 tokens: both gradients to row groups, and in BF16 to the tiles.
    for strip in gl.static_range(128 // STRIP):
        row = (
            gl.program_id(1).to(gl.int64) * 128
            + strip * STRIP
            + gl.arange(0, STRIP, gl.SliceLayout(1, BY_ROW))
        )
        inside = row < tokens
        dy = widen(load_rows(DY, row, inside, group, C, C))
        gate = widen(load_rows(GATE_UP, row, inside, group, C, 2 * C))
        up = widen(load_rows(GATE_UP + C, row, inside, group, C, 2 * C))
        d_gate, d_up = _d_gate(dy, gate, up), _d_up(dy, gate)
        gates.slice(strip * STRIP, STRIP, 0).store(d_gate)
        ups.slice(strip * STRIP, STRIP, 0).store(d_up)
        store_rows(
            d_gate, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, group, 2 * WHOLE, 2 * WHOLE,
            POWER_OF_TWO,
        )  # fmt: skip
        store_rows(
            d_up, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, WHOLE // 128 + group,
            2 * WHOLE, 2 * WHOLE, POWER_OF_TWO,
        )  # fmt: skip
    # The compiler puts the barrier between.
    store_tokens(gates, TOKEN_VALUES, TOKEN_SCALES, group, C, 0, COLUMNS, POWER_OF_TWO)
    store_tokens(ups, TOKEN_VALUES, TOKEN_SCALES, group, C, C, COLUMNS, POWER_OF_TWO)


def swiglu_backward_quantise(
    dy: torch.Tensor, gate_up: torch.Tensor, scales: ScaleKind = "power_of_two"
) -> tuple[QuantRows, QuantRows]:
    """dy [T, C] and gate_up [T, 2 C], BF16, contiguous -> the gradient d of gate_up: d in row
    groups, each half in whole blocks, and d^T [2 C, Tp].
    """
    assert dy.is_contiguous()
    count, columns = dy.shape
    parts = (columns, columns)
    rows = QuantRows.empty(count, padded_size(parts), dy.device)
    tokens = empty_tokens(gate_up, 2 * columns)
    _swiglu_backward_quantise_kernel[tile_grid(count, columns)](
        dy, gate_up, rows.values, rows.scales, rows.scales.stride(1), tokens.values, tokens.scales,
        count,
        columns, padded_size((columns,)), tokens.scales.stride(1), scales == "power_of_two",
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return rows, tokens


def swiglu_backward_bf16(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The same gradient in BF16, before it is quantised."""
    assert dy.is_contiguous()
    assert gate_up.is_contiguous()
    count, columns = dy.shape
    out = torch.empty_like(gate_up)
    width = min(1024, triton.next_power_of_2(columns))
    _swiglu_backward_kernel[(count, triton.cdiv(columns, width))](
        dy, gate_up, out, columns, width, num_warps=4, enable_fp_fusion=False
    )
    return out
