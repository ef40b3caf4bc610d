"""RMSNorm and SwiGLU, or another gate, with the quantisation that follows (``quantise``,
``token_groups``), their backwards, and that of the embedding.

**Embedding.**  A stable sort brings equal ids together and keeps their tokens in order.  The
program at the first place of a run of equal ids adds the run's rows of d_hidden in FP32, starting
from zero, and then adds the sum to the gradient's row, which no other program writes: the bits of
``torch.ops.aten.embedding_dense_backward`` on the CPU.

**RMSNorm**, with the residual's gradient and the weight's, in one pass:

    n  = h / sqrt(mean(h^2) + eps)              h: the norm's input, the residual stream
    s  = dy w
    dh = d_residual + (s - n mean(s n)) / rms   FP32, rounded to BF16 once; without a residual the
                                                second term alone
    dw += sum over tokens of dy n               FP32

One program computes a token's sums, in a layout that depends on the number of channels alone, so a
row of dh depends on no other row.  At most BLOCKS programs walk the tokens, each a run of
neighbours in ascending order, and leave their sums of dy n to ``add_block_sums``, which has one
order for every number of tokens.  The kernel moves 8 bytes a number, and BLOCKS sums of 4 bytes a
channel.

**SwiGLU's gradient** is quantised as DGrad and WGrad read it, or in BF16 for a layer in BF16.  With
dy the gradient of y = silu(gate) * up, s = 1 / (1 + exp(-gate)) and silu = gate * s:

    d gate = dy * up * (s + silu * (1 - s))        d up = dy * silu

both rounded to BF16; of another ``Gate`` those of ``isobit.kernels.spec.pointwise``, where s is
sigmoid of the function's own exponent and what is clamped has no gradient.  This is the largest
operand of the backward, 2 C numbers a token.  A program computes a tile of both gradients in
strips, with the functions of ``isobit.kernels.triton.token_groups``; three inputs and two tiles in
shared memory allow three programs a multiprocessor.  In INT8 a program takes a whole row, since
each half has one scale, in chunks that it holds behind the Hadamard matrix; dy and gate are read
twice, the second time from a cache.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isobit.kernels.observing import is_observed
from isobit.kernels.operands import Gate, LinearInput, Normed, Operand, OutputGradient
from isobit.kernels.triton.device_functions import add_block_sums, padded_size, rotated_row
from isobit.kernels.triton.linear import (
    input_saved,
    linear_input,
    of_int8_rows,
    output_gradient,
)
from isobit.kernels.triton.quantise import (
    _ALPHA,
    _CUBIC,
    _LIMIT,
    _STEEP,
    QuantRows,
    amax_bits,
    at_most,
    chunk_of_row,
    clamped_up,
    exponent,
    four_sigmoids,
    larger_size,
    launch_of_chunks,
    levels,
    quantise_groups,
    rms_norm_int8,
    rms_norm_quantise,
    store_chunks,
    swiglu,
    swiglu_int8,
    swiglu_quantise,
)
from isobit.kernels.triton.token_groups import (
    BY_ROW,
    PADDED,
    STRIP,
    WARPS,
    empty_tokens,
    load_rows,
    store_rows,
    store_tokens,
    swiglu_both,
    swiglu_tokens,
    tile_grid,
    widen,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, EIGHT_BITS, Int8Parts, ScaleKind

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)


_UNROLLED = 8  # rows whose loads are in flight together
_WIDEST = 1024  # columns of a program


@triton.jit
def _run_kernel(
    SORTED, TOKEN, END, DH, GRAD, C: tl.constexpr, WIDTH: tl.constexpr, UNROLLED: tl.constexpr
):
    """One program a place of the sorted ids and WIDTH columns."""
    place = tl.program_id(0)
    row = tl.load(SORTED + place)
    if tl.load(SORTED + place - 1, mask=place > 0, other=-1) == row:
        return
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < C
    end = tl.load(END + place)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(place, end, UNROLLED):
        for i in tl.static_range(UNROLLED):
            there = first + i < end
            token = tl.load(TOKEN + first + i, mask=there, other=0)
            total += tl.load(DH + token * C + column, mask=inside & there, other=0.0).to(
                tl.float32
            )  # + 0.0 changes no bit of a sum
    at = GRAD + row * C + column
    tl.store(at, tl.load(at, mask=inside) + total, mask=inside)


def columns_of_program(columns: int) -> int:
    """Columns of a program, a power of two, for rows of ``columns``."""
    return min(_WIDEST, triton.next_power_of_2(columns))


def embedding_backward(d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor) -> None:
    """d_hidden BF16 [T, C], token_ids int64 [T], contiguous -> added to FP32 [V, C]; no waiting."""
    tokens, columns = d_hidden.shape
    if not tokens:
        return
    ids, order = torch.sort(token_ids, stable=True)
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    width = columns_of_program(columns)
    _run_kernel[(tokens, triton.cdiv(columns, width))](
        ids, order, ends, d_hidden, grad, columns, width, _UNROLLED, num_warps=4
    )


def add_rms_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    site: Site | None,
    save: bool = False,
    keep: bool = False,
    as_bytes: bool = False,
) -> Normed:
    """h and x BF16 [T, C]; the norm itself is written only where it is read.  Here and below, E4M3
    is written ``as_bytes``, by integers alone, for cards before sm_89.
    """
    format = None if site is None else site.forward
    keep = keep or format not in EIGHT_BITS or save or is_observed()
    if format == "int8":
        h, norm, quantised = rms_norm_int8(h, x, weight, epsilon, keep)
    else:
        scales = site.scales if site is not None and format == "e4m3" else None
        h, norm, quantised = rms_norm_quantise(h, x, weight, epsilon, scales, keep, as_bytes)
    if site is None:
        return Normed(h, norm, None)
    read = norm if quantised is None else quantised
    assert read is not None
    saved = None
    if save:
        assert norm is not None
        saved = input_saved(norm, site, as_bytes)
    return Normed(h, norm, LinearInput(read, saved))


BLOCKS = 512  # almost four programs for each of an H200's 132 multiprocessors
_NUMBERS = 2048  # that a program holds at once, of several rows where they are short
_NUMBERS_OF_WARP = 512  # at 1024 the registers allow 8 warps a multiprocessor instead of 16
_MOST_WARPS = 16  # beyond 8192 channels a few registers spill, with 32 warps many


@triton.jit(do_not_specialize=["tokens", "tokens_of_block"])
def _norm_kernel(
    DY, H, WEIGHT, D_RESIDUAL, DH, SUMS, tokens, tokens_of_block, epsilon, C: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """One program a block of tokens, ROWS at a time, of C channels padded to WIDTH."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum((block + 1) * tokens_of_block, tokens)
    for first in range(block * tokens_of_block, end, ROWS):
        t = first + tl.arange(0, ROWS)
        inside = (t < end)[:, None] & (column < C)[None, :]
        at = t[:, None] * C + column[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(H + at, mask=inside, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / C + epsilon)
        normalised = h * inverse[:, None]
        scaled = dy * weight
        mean = tl.sum(scaled * normalised, 1) / C
        dh = (scaled - normalised * mean[:, None]) * inverse[:, None]
        if D_RESIDUAL is not None:
            dh += tl.load(D_RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DH + at, dh.to(tl.bfloat16), mask=inside)
        if SUMS is not None:
            sums += tl.sum(dy * normalised, 0)
    if SUMS is not None:
        tl.store(SUMS + block * C + column, sums, mask=column < C)


def layout(columns: int) -> tuple[int, int, int]:
    """Channels -> their number as a power of two, and the rows and warps of a program."""
    width = triton.next_power_of_2(columns)
    return width, max(1, _NUMBERS // width), min(max(4, width // _NUMBERS_OF_WARP), _MOST_WARPS)


def rms_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    d_residual: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of ``y = RMSNorm(h)`` for h: all BF16 [T, C] and contiguous, the published
    weight BF16 [C].  ``d_residual`` is the gradient that reaches h past the norm, or None.  The
    weight's is added to ``grad``, FP32 [C], unless that is None.
    """
    tokens, columns = h.shape
    dh = torch.empty_like(h)
    if not tokens:
        return dh
    width, rows, warps = layout(columns)
    tokens_of_block = triton.cdiv(triton.cdiv(tokens, BLOCKS), rows) * rows
    blocks = triton.cdiv(tokens, tokens_of_block)
    sums = None
    if grad is not None:
        sums = torch.empty((blocks, columns), dtype=torch.float32, device=h.device)
    _norm_kernel[(blocks,)](
        dy, h, weight, d_residual, dh, sums, tokens, tokens_of_block, epsilon, columns, width, rows,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    if sums is not None and grad is not None:
        add_block_sums(sums, grad)
    return dh


def swiglu_input(
    gate_up: torch.Tensor,
    site: Site,
    save: bool = False,
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> LinearInput:
    """gate_up BF16 [T, 2 C] -> ``swiglu`` as the linear ``site`` reads it."""
    if site.forward not in EIGHT_BITS:
        return linear_input(swiglu(gate_up, gate), site, save, as_bytes)
    if save and site.wgrad == "e4m3":
        if site.forward == "int8":
            read = swiglu_int8(gate_up, gate=gate)
            return LinearInput(read, swiglu_saved(gate_up, site, gate, as_bytes))
        return LinearInput(*swiglu_both(gate_up, site.scales, gate, as_bytes))
    kept = None
    if save:
        kept = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    if site.forward == "int8":
        return LinearInput(swiglu_int8(gate_up, kept, gate), kept)
    return LinearInput(swiglu_quantise(gate_up, site.scales, kept, gate, as_bytes), kept)


def swiglu_saved(
    gate_up: torch.Tensor, site: Site, gate: Gate = "silu", as_bytes: bool = False
) -> Operand:
    """``swiglu`` as the linear's WGrad reads it."""
    if site.wgrad != "e4m3":
        return swiglu(gate_up, gate)
    return swiglu_tokens(gate_up, site.scales, gate, as_bytes)


def swiglu_backward(
    d_activation: torch.Tensor,
    gate_up: torch.Tensor,
    site: Site,
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> OutputGradient:
    """[T, C] and [T, 2 C], BF16 -> the gradient of ``gate_up``, as dY of the linear ``site``."""
    if site.dgrad == "int8":
        return of_int8_rows(*swiglu_backward_int8(d_activation, gate_up, gate), site, as_bytes)
    if site.dgrad == site.wgrad == "e4m3":
        made = swiglu_backward_quantise(d_activation, gate_up, site.scales, gate, as_bytes)
        return OutputGradient(*made)
    if site.dgrad == "e4m3" and not d_activation.shape[1] % BLOCK:
        rows = QuantRows.empty(*gate_up.shape, gate_up.device)
        to = rows.written(as_bytes)
        made = swiglu_backward_bf16(d_activation, gate_up, to, site.scales, gate)
        return OutputGradient(rows, made)
    return output_gradient(swiglu_backward_bf16(d_activation, gate_up, gate=gate), site, as_bytes)


@triton.jit
def _gate_gradient(dy, gate, up, GATE: tl.constexpr):
    """FP32 each -> BF16."""
    x = gate
    if GATE == "clamped_silu":
        x = at_most(gate)
        up = clamped_up(up)
    sigmoid = 0.25 * four_sigmoids(exponent(x, GATE))
    d = dy * up
    slope = x * sigmoid * (1.0 - sigmoid)
    if GATE == "gelu_tanh":
        slope *= (x * x * (3 * _CUBIC) + 1.0) * _STEEP
    elif GATE == "clamped_silu":
        slope *= _ALPHA
    d *= sigmoid + slope
    if GATE == "clamped_silu":
        d = tl.where(gate > _LIMIT, 0.0, d)
    return d.to(tl.bfloat16)


@triton.jit
def _up_gradient(dy, gate, up, GATE: tl.constexpr):
    """FP32 each -> BF16; ``up`` is read only where it is clamped."""
    x = gate
    if GATE == "clamped_silu":
        x = at_most(gate)
    d = dy * (x * (0.25 * four_sigmoids(exponent(x, GATE))))
    if GATE == "clamped_silu":
        d = tl.where(tl.abs(up) > _LIMIT, 0.0, d)
    return d.to(tl.bfloat16)


@triton.jit(do_not_specialize=["scale_stride"])
def _swiglu_backward_kernel(
    DY, GATE_UP, OUT, VALUES, SCALES, scale_stride, C: tl.constexpr, WIDTH: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One program WIDTH columns of one row; with VALUES, where C is whole groups of 128, also in
    row groups.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    column = first + tl.arange(0, WIDTH)
    inside = column < C
    dy = tl.load(DY + row * C + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0).to(tl.float32)
    d_gate = _gate_gradient(dy, gate, up, GATE)
    d_up = _up_gradient(dy, gate, up, GATE)
    tl.store(OUT + row * 2 * C + column, d_gate, mask=inside)
    tl.store(OUT + row * 2 * C + C + column, d_up, mask=inside)
    if VALUES is not None:
        as_bytes: tl.constexpr = VALUES.dtype.element_ty == tl.uint8
        group = first // 128 + tl.arange(0, WIDTH // 128)
        for half in tl.static_range(2):
            x = d_up if half else d_gate
            values, scales = quantise_groups(
                x.to(tl.float32), WIDTH // 128, POWER_OF_TWO, None, as_bytes
            )
            tl.store(VALUES + (row * 2 + half) * C + column, values, mask=inside)
            place = (half * (C // 128) + group) * scale_stride + row
            tl.store(SCALES + place, scales, mask=group < C // 128)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu_backward_int8_kernel(
    DY, GATE_UP, OUT, VALUES, SCALES, AMAX, tokens, C: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One program a row of C numbers, in CHUNKS chunks: d gate, then d up, in BF16 and in INT8 with
    a scale each, padded with zeros to WHOLE; the bits of their largest numbers to AMAX [2, tokens].
    """
    row = tl.program_id(0).to(tl.int64)
    for half in tl.static_range(2):
        before = tl.zeros([CHUNK], tl.float32)
        behind = tl.zeros([CHUNK], tl.float32)
        chunks = ()
        for i in tl.static_range(CHUNKS):
            column = i * CHUNK + tl.arange(0, CHUNK)
            inside = column < C
            dy = tl.load(DY + row * C + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(GATE_UP + row * 2 * C + column, mask=inside, other=0.0).to(tl.float32)
            up = None
            if half == 0 or GATE == "clamped_silu":
                up = tl.load(GATE_UP + row * 2 * C + C + column, mask=inside, other=0.0)
                up = up.to(tl.float32)
            if half == 0:
                d = _gate_gradient(dy, gate, up, GATE)
            else:
                d = _up_gradient(dy, gate, up, GATE)
            tl.store(OUT + row * 2 * C + half * C + column, d, mask=inside)
            wide = d.to(tl.float32)
            before = larger_size(before, wide)
            x = rotated_row(wide, CHUNK, LEVELS)
            behind = larger_size(behind, x)
            chunks = chunks + (x,)  # noqa: RUF005 (Triton unpacks no tuple)
        place = half * tokens + row
        tl.store(AMAX + place, amax_bits(before, 0))
        to = VALUES + (row * 2 + half) * WHOLE
        store_chunks(chunks, behind, to, SCALES + place, WHOLE, CHUNK, CHUNKS)


def swiglu_backward_int8(
    dy: torch.Tensor, gate_up: torch.Tensor, gate: Gate = "silu"
) -> tuple[torch.Tensor, Int8Parts, torch.Tensor]:
    """dy [T, C] and gate_up [T, 2 C], BF16, contiguous -> the gradient d of gate_up in BF16, its
    halves in INT8 as DGrad reads them, and the bits of their largest numbers, int32 [2, T].
    """
    assert dy.is_contiguous()
    assert gate_up.is_contiguous()
    (count, columns), device = dy.shape, dy.device
    out, whole, chunk = torch.empty_like(gate_up), padded_size((columns,)), chunk_of_row(columns)
    values = torch.empty((count, 2 * whole), dtype=torch.int8, device=device)
    scales = torch.empty((2, count), dtype=torch.float32, device=device)
    amax = torch.empty((2, count), dtype=torch.int32, device=device)
    _swiglu_backward_int8_kernel[(count,)](
        dy, gate_up, out, values, scales, amax, count, columns, whole, chunk,
        triton.cdiv(columns, chunk), levels(columns), gate, **launch_of_chunks(columns),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out, Int8Parts(values, scales, (columns, columns)), amax


# The same functions, compiled as parts of a Gluon kernel.
_d_gate, _d_up = (gluon.jit(part.fn) for part in (_gate_gradient, _up_gradient))


@gluon.jit(do_not_specialize=["tokens", "scale_stride"])
def _swiglu_backward_quantise_kernel(
    DY, GATE_UP, ROW_VALUES, ROW_SCALES, scale_stride, TOKEN_VALUES, TOKEN_SCALES, tokens,
    C: gl.constexpr, WHOLE: gl.constexpr, COLUMNS: gl.constexpr, POWER_OF_TWO: gl.constexpr,
    GATE: gl.constexpr,
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
        d_gate, d_up = _d_gate(dy, gate, up, GATE), _d_up(dy, gate, up, GATE)
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
    dy: torch.Tensor,
    gate_up: torch.Tensor,
    scales: ScaleKind = "power_of_two",
    gate: Gate = "silu",
    as_bytes: bool = False,
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
        dy, gate_up, rows.written(as_bytes).values, rows.scales, rows.scales.stride(1),
        tokens.written(as_bytes).values, tokens.scales, count,
        columns, padded_size((columns,)), tokens.scales.stride(1), scales == "power_of_two",
        gate, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return rows, tokens


def swiglu_backward_bf16(
    dy: torch.Tensor,
    gate_up: torch.Tensor,
    rows: QuantRows | None = None,
    scales: ScaleKind = "power_of_two",
    gate: Gate = "silu",
) -> torch.Tensor:
    """The same gradient in BF16, before it is quantised; with ``rows`` [T, 2 C], of whole groups of
    128, it is also quantised into them.
    """
    assert dy.is_contiguous()
    assert gate_up.is_contiguous()
    count, columns = dy.shape
    assert rows is None or not columns % BLOCK
    out = torch.empty_like(gate_up)
    width = min(1024, triton.next_power_of_2(columns))
    values, scale, stride = (None, None, 0)
    if rows is not None:
        values, scale, stride = rows.values, rows.scales, rows.scales.stride(1)
    _swiglu_backward_kernel[(count, triton.cdiv(columns, width))](
        dy, gate_up, out, values, scale, stride, columns, width, scales == "power_of_two", gate,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
