"""Quantisers of WGrad's operands: E4M3 in groups of 128 tokens of one column, written transposed.

    quantise_tokens    x                  -> x^T in token groups
    quantise_both      x                  -> x in row groups, and x^T in token groups
    gradient_both      dY                 -> dY in row groups, and dY^T in token groups
    swiglu_tokens      silu(gate) * up    -> y^T in token groups
    swiglu_both        silu(gate) * up    -> y in row groups, and y^T in token groups

each, perhaps of another ``Gate``, from one read of its input; row groups are those of FProp or
DGrad.  Tensor cores read both operands along the tokens, so X [T, C] becomes values [C, Tp], Tp = T
rounded up to 128, and scales [C, Tp / 128]: a ``QuantRows`` of X^T, zeros beyond T.  The bytes are
those of ``quantise_tokens`` and ``quantise_rows`` in ``isobit.kernels.spec.quantise``, of input
that is rounded to BF16 first.

A program has a tile of 128 tokens and 128 columns, in which both kinds of group are whole.  Strips
of 32 tokens are loaded, stored as row groups, and kept in shared memory in BF16; strips of 32
columns are then read from there and stored as token groups.  A thread holds 16 numbers at a time,
so up to six programs share a multiprocessor and hide each other's latency.  The rows of shared
memory are padded by 16 bytes every 16 rows: the 8 threads that read a column's 128 tokens then use
different banks, and vectors of 16 bytes stay aligned, which Triton does not check.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isobit.kernels.operands import Gate
from isobit.kernels.triton.device_functions import padded_size, runs
from isobit.kernels.triton.quantise import QuantRows, amax_bits, gated, to_e4m3
from isobit.precision.quant_tensor import BLOCK, ScaleKind, num_blocks

WARPS = 8
STRIP = gl.constexpr(32)

# Layouts of a strip over 8 warps, 16 numbers a thread.  BY_ROW, [32, 128]: twice 8 neighbours of a
# row, 4 rows a warp.  BY_COLUMN, [128, 32]: 16 tokens of a column, 4 columns a warp.
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
BY_COLUMN = gl.constexpr(gl.BlockedLayout([16, 1], [8, 4], [1, 8], [0, 1]))
PADDED = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[16 * 128, 8]], [128, 128], [1, 0]))

# The same functions as in the quantisers of rows, compiled as parts of a Gluon kernel.
_amax_bits, _to_e4m3, _gated = (gluon.jit(part.fn) for part in (amax_bits, to_e4m3, gated))


@gluon.jit
def widen(x):
    """BF16 -> FP32 by pairs, or ptxas would also round to BF16 singly, with a slow instruction."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_rows(X, row, inside, group, C: gl.constexpr, ROW: gl.constexpr):
    """BF16 strip of a group of 128 of the first C columns of X [tokens, ROW], zeros beyond both."""
    column = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, BY_ROW))
    mask = inside[:, None]
    if C % 128:
        mask = mask & (column < C)[None, :]
    return gl.load(X + row[:, None] * ROW + column[None, :], mask=mask, other=0.0)


@gluon.jit
def store_rows(
    strip, VALUES, SCALES, scale_stride, row, inside, group,
    C: gl.constexpr, ROW: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """BF16 strip, one group of 128 columns -> the first C columns of values [tokens, ROW], and
    scales [ceil(C/128), tokens].
    """
    x = widen(strip)
    as_bytes: gl.constexpr = VALUES.dtype.element_ty == gl.uint8
    values, scales = _to_e4m3(x, _amax_bits(x, 1)[:, None], POWER_OF_TWO, as_bytes)
    column = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, BY_ROW))
    mask = inside[:, None]
    if C % 128:
        mask = mask & (column < C)[None, :]
    gl.store(VALUES + row[:, None] * ROW + column[None, :], values, mask=mask)
    gl.store(SCALES + group.to(gl.int64) * scale_stride + row, gl.max(scales, 1), mask=inside)


@gluon.jit
def store_tokens(
    tile, VALUES, SCALES, group,
    C: gl.constexpr, START: gl.constexpr, COLUMNS: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """BF16 tile in shared memory, one group of 128 of C columns -> from row START of values
    [COLUMNS, Tp], and of scales [Tp/128, COLUMNS].
    """
    as_bytes: gl.constexpr = VALUES.dtype.element_ty == gl.uint8
    token = gl.program_id(1) * 128 + gl.arange(0, 128, gl.SliceLayout(1, BY_COLUMN))
    for strip in gl.static_range(128 // STRIP):
        x = tile.slice(strip * STRIP, STRIP, 1).load(BY_COLUMN).to(gl.float32)
        values, scales = _to_e4m3(x, _amax_bits(x, 0)[None, :], POWER_OF_TWO, as_bytes)
        column = group * 128 + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, BY_COLUMN))
        row, inside, both = START + column, None, None
        if C % 128:
            inside = column < C
            both = inside[None, :]
        gl.store(
            VALUES + row.to(gl.int64)[None, :] * (gl.num_programs(1) * 128) + token[:, None],
            values,
            mask=both,
        )
        gl.store(SCALES + gl.program_id(1) * COLUMNS + row, gl.max(scales, 0), mask=inside)


@gluon.jit(do_not_specialize=["tokens", "scale_stride"])
def _quantise_kernel(
    X, ROW_VALUES, ROW_SCALES, scale_stride, TOKEN_VALUES, TOKEN_SCALES, tokens,
    C: gl.constexpr, X_ROW: gl.constexpr, OUT: gl.constexpr, OUT_ROW: gl.constexpr,
    COLUMNS: gl.constexpr, GATE: gl.constexpr, ROWS: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """One program a tile of C columns of X [tokens, X_ROW], to OUT columns of OUT_ROW in row groups
    and to C rows of COLUMNS in token groups; with a GATE, of its function times up, with up C
    columns behind.
    """
    tile = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PADDED)
    group = gl.program_id(0)  # of columns; axis 1 counts groups of tokens

    # Strips of 32 tokens, to row groups and to the tile; zeros for tokens beyond the last.
    for strip in gl.static_range(128 // STRIP):
        row = (
            gl.program_id(1).to(gl.int64) * 128
            + strip * STRIP
            + gl.arange(0, STRIP, gl.SliceLayout(1, BY_ROW))
        )
        inside = row < tokens
        if GATE is not None:
            gate = load_rows(X, row, inside, group, C, X_ROW)
            up = load_rows(X + C, row, inside, group, C, X_ROW)
            x = _gated(widen(gate), widen(up), GATE)
        else:
            x = load_rows(X, row, inside, group, C, X_ROW)
        tile.slice(strip * STRIP, STRIP, 0).store(x)
        if ROWS:
            store_rows(
                x, ROW_VALUES, ROW_SCALES, scale_stride, row, inside, group, OUT, OUT_ROW,
                POWER_OF_TWO,
            )  # fmt: skip
    # The compiler puts the barrier between.
    store_tokens(tile, TOKEN_VALUES, TOKEN_SCALES, group, C, 0, COLUMNS, POWER_OF_TWO)


def quantise_tokens(
    x: torch.Tensor, scales: ScaleKind = "power_of_two", as_bytes: bool = False
) -> QuantRows:
    """[T, C] BF16, contiguous -> x^T in token groups, [C, Tp]."""
    tokens = empty_tokens(x, x.shape[1])
    _quantise(x, None, tokens, scales, x.shape[1], as_bytes)
    return tokens


def quantise_both(
    x: torch.Tensor, scales: ScaleKind = "power_of_two", as_bytes: bool = False
) -> tuple[QuantRows, QuantRows]:
    """[T, C] BF16, contiguous -> x in row groups, [T, C], and x^T in token groups, [C, Tp]."""
    rows, tokens = QuantRows.empty(*x.shape, x.device), empty_tokens(x, x.shape[1])
    _quantise(x, rows, tokens, scales, x.shape[1], as_bytes)
    return rows, tokens


def gradient_both(
    dy: torch.Tensor,
    parts: tuple[int, ...],
    scales: ScaleKind = "power_of_two",
    as_bytes: bool = False,
) -> tuple[QuantRows, QuantRows]:
    """dY [T, N] BF16, contiguous, of a matrix with these ``parts`` -> dY in row groups as
    ``quantise_gradient`` gives it, and dY^T in token groups, [N, Tp].
    """
    rows = QuantRows.empty(dy.shape[0], padded_size(parts), dy.device)
    tokens = empty_tokens(dy, dy.shape[1])
    for run in runs(parts):
        part = slice(run.first, run.first + run.size)
        _quantise(
            dy[:, part], rows.groups(run.first_block, run.blocks),
            QuantRows(tokens.values[part], tokens.scales[part]), scales, dy.shape[1], as_bytes,
        )  # fmt: skip
    return rows, tokens


def swiglu_tokens(
    gate_up: torch.Tensor,
    scales: ScaleKind = "power_of_two",
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> QuantRows:
    """[T, 2 C] BF16, contiguous, gate before up -> (silu(gate) * up)^T in token groups, [C, Tp]."""
    tokens = empty_tokens(gate_up, gate_up.shape[1] // 2)
    _quantise(gate_up, None, tokens, scales, gate_up.shape[1], as_bytes, gate)
    return tokens


def swiglu_both(
    gate_up: torch.Tensor,
    scales: ScaleKind = "power_of_two",
    gate: Gate = "silu",
    as_bytes: bool = False,
) -> tuple[QuantRows, QuantRows]:
    """[T, 2 C] as above -> y in row groups, [T, C], and y^T in token groups, [C, Tp]."""
    count, columns = gate_up.shape[0], gate_up.shape[1] // 2
    rows, tokens = QuantRows.empty(count, columns, gate_up.device), empty_tokens(gate_up, columns)
    _quantise(gate_up, rows, tokens, scales, gate_up.shape[1], as_bytes, gate)
    return rows, tokens


def _quantise(
    x: torch.Tensor,
    rows: QuantRows | None,
    tokens: QuantRows,
    scales: ScaleKind,
    row: int,
    as_bytes: bool,
    gate: Gate | None = None,
) -> None:
    """Columns of x, ``row`` apart, to rows of ``tokens`` and to ``rows``, padded with zeros."""
    tokens = tokens.written(as_bytes)
    count, columns = x.shape[0], tokens.values.shape[0]
    to = tokens if rows is None else rows.written(as_bytes)
    written, out_row = (
        (columns, columns) if rows is None else (rows.values.shape[1], rows.values.stride(0))
    )
    _quantise_kernel[tile_grid(count, columns)](
        x, to.values, to.scales, to.scales.stride(1), tokens.values, tokens.scales, count,
        columns, row, written, out_row, tokens.scales.stride(1), gate, rows is not None,
        scales == "power_of_two", num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def empty_tokens(source: torch.Tensor, columns: int) -> QuantRows:
    """Uninitialised token groups of a matrix [T, columns] with the rows of ``source``."""
    assert source.dtype == torch.bfloat16
    assert source.is_contiguous()
    return QuantRows.empty(columns, num_blocks(source.shape[0]) * BLOCK, source.device)


def tile_grid(tokens: int, columns: int) -> tuple[int, int]:
    """The grid; neighbours share tokens."""
    return num_blocks(columns), num_blocks(tokens)
