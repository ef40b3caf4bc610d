"""DGrad and WGrad in INT8 on Hopper, with the bits of ``isobit.kernels.spec.int8_backward``: the
products, of all experts too, of the operands of ``isobit.kernels.triton.int8_backward``.

One kernel of persistent programs makes both products, a quarter of a tile at a time behind the loop
over blocks, which the registers and the shared memory of two programs hold.  WGrad's is added to
the gradient.  A program takes the parts of a tile of DGrad's in turn, and keeps their sums in
memory of its own, which the L2 cache holds: a launch for each part would read and write 8 bytes a
number more.  A barrier stands between parts, since the compiler lays these numbers out over the
threads in two ways.  (An earlier kernel kept the sums in registers, with a loop over parts around
the loop over blocks.  On a card with Triton 3.6 they were wrong, and right in its interpreter; why
is not known.)

Experts have their rows of tokens in whole blocks (``isobit.kernels.triton.dispatch``), and one
launch makes a product of all of them: DGrad's tiles read the matrix of the expert whose rows they
are, WGrad's the blocks of tokens of the expert whose gradient they are.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isobit.kernels.hopper.int8 import BAND
from isobit.kernels.hopper.sizes import PROGRAMS
from isobit.kernels.operands import Quantised
from isobit.kernels.triton.dispatch import Dispatch
from isobit.kernels.triton.int8 import scaled
from isobit.kernels.triton.int8_backward import BalancedRows
from isobit.precision.quant_tensor import BLOCK, Int8Parts, num_blocks

_TILE = 128  # rows and columns of a product's tile
_STAGES = 3


@triton.jit
def _tile(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of a tile: bands of BAND rows of tiles share the right operand."""
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    row = band * BAND + tile % (BAND * tiles_n) % height
    return row, tile % (BAND * tiles_n) // height


@triton.jit
def _halves(x):
    """[TILE, N] -> its first and its last columns, [TILE, N / 2] each."""
    return tl.split(tl.trans(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 0, 2, 1))


@triton.jit
def _add(GRAD, made, row, column, m, n):
    inside = (row < m)[:, None] & (column < n)[None, :]
    place = GRAD + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + made, mask=inside)


@triton.jit
def _end_part(
    SUMS, OUT, made, row, column, within, m, n, part, PARTS: tl.constexpr, TILE: tl.constexpr
):
    """Add the part to those before, which are in the program's SUMS, FP32 [TILE, TILE], at the
    columns ``within``; the last one goes to OUT.
    """
    inside = (row < m)[:, None] & (column < n)[None, :]
    place = OUT + row[:, None].to(tl.int64) * n + column[None, :]
    before = 0.0  # which takes the sign from a zero
    if PARTS > 1:
        to = SUMS + tl.arange(0, TILE)[:, None] * TILE + within[None, :]
        every = tl.full(made.shape, 1, tl.int1)
        before = tl.load(to, mask=every & (part > 0), other=0.0)
        tl.store(to, before + made, mask=every & (part < PARTS - 1))
        inside = inside & (part == PARTS - 1)
    tl.store(place, (before + made).to(tl.bfloat16), mask=inside)


@triton.jit
def _blocks_of(part, blocks, PARTS: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr):
    """The first block of a part, and their number."""
    begin = tl.where(part == 0, 0, tl.where(part == 1, PART_1, PART_2))
    end = tl.where(part == 0, PART_1, blocks if PARTS == 2 else PART_2)
    return begin, tl.where(part == 2, blocks, end) - begin


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    LEFT, RIGHT, LEFT_SCALE, RIGHT_SCALE, SUMS, OUT, EXPERTS, STARTS, m, n, rows, blocks, tiles,
    PARTS: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, TILE: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Products of descriptors of LEFT [m, ..] and RIGHT [rows, ..], of so many blocks, to OUT.

    WGrad has one part, and OUT is the gradient, FP32 [m, n], to which it is added.  DGrad has up to
    three, which begin at the blocks 0, PART_1 and PART_2, with scales [PARTS, m] and [PARTS, rows];
    OUT is BF16 [m, n], and SUMS is FP32 [programs, TILE, TILE].

    With EXPERTS, int32 [m], ``rows`` is E n, and a tile of rows is multiplied by its expert's.
    With STARTS, int32 [E + 1], the product of expert e is of the blocks from STARTS[e] to STARTS[e
    + 1], with scales [E, m] and [E, n], and OUT is [E, m, n].
    """
    tiles_m = tl.cdiv(m, TILE)
    tiles_n = tl.cdiv(n, TILE)
    turns = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)) * PARTS
    sums_of_program = SUMS
    if PARTS > 1:
        sums_of_program += tl.program_id(0) * TILE * TILE
    for turn in tl.range(0, turns, flatten=True):
        tile = tl.program_id(0) + turn // PARTS * tl.num_programs(0)
        part = turn % PARTS
        tile_row, tile_column = _tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, BAND)
        first_row, first_column = tile_row * TILE, tile_column * TILE
        begin, number, height = 0, blocks, m
        of_left, of_right, out = LEFT_SCALE, RIGHT_SCALE, OUT
        b_row = first_column
        if PARTS > 1:
            begin, number = _blocks_of(part, blocks, PARTS, PART_1, PART_2)
            of_left += part * m
            of_right += part * rows
        if EXPERTS is not None:
            expert = tl.load(EXPERTS + first_row)
            number = tl.where(expert < 0, 0, number)
            expert = tl.maximum(expert, 0)
            b_row += expert * n
            of_right += expert * n
        if STARTS is not None:
            expert = tile // (tiles_m * tiles_n)
            begin = tl.load(STARTS + expert)
            number = tl.load(STARTS + expert + 1) - begin
            height = tl.where(number > 0, m, 0)  # an expert without tokens has no scales
            of_left += expert * m
            of_right += expert * n
            out += expert.to(tl.int64) * m * n
        sums = tl.zeros([TILE, TILE], tl.int32)
        for block in range(0, number):
            a = LEFT.load([first_row, (begin + block) * 128])
            b = RIGHT.load([b_row, (begin + block) * 128])
            sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
        row = first_row + tl.arange(0, TILE)
        column = first_column + tl.arange(0, TILE)
        row_scale = tl.load(of_left + row % m)
        column_scale = tl.load(of_right + column % n)
        made = scaled(sums, row_scale[:, None], column_scale[None, :])
        left, right = _halves(made)
        quarters = _halves(left) + _halves(right)
        for i in tl.static_range(4):
            within = i * (TILE // 4) + tl.arange(0, TILE // 4)
            place = first_column + within
            if OUT.dtype.element_ty == tl.float32:
                _add(out, quarters[i], row, place, height, n)
            else:
                _end_part(
                    sums_of_program, out, quarters[i], row, place, within, m, n, part, PARTS, TILE
                )
        if PARTS > 1:
            tl.debug_barrier()  # other threads than wrote SUMS may read them


def _tiles_of(values: torch.Tensor) -> TensorDescriptor:
    rows, depth = values.shape
    return TensorDescriptor(values, [rows, depth], [depth, 1], [_TILE, BLOCK])


def _multiply(
    left: Quantised,
    right: Quantised,
    out: torch.Tensor,
    parts: Sequence[int] = (0,),
    experts: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """``_product_kernel``, of parts that begin at such blocks."""
    (m, depth), (rows, _), n = left.values.shape, right.values.shape, out.shape[1]
    tiles = triton.cdiv(m, _TILE) * triton.cdiv(n, _TILE)
    if starts is not None:
        tiles *= len(starts) - 1
    programs, sums = min(2 * PROGRAMS, tiles), None
    if len(parts) > 1:
        sums = torch.empty((programs, _TILE, _TILE), dtype=torch.float32, device=out.device)
    assert len(parts) <= 3
    _, second, third, *_ = *parts, 0, 0
    _product_kernel[(programs,)](
        _tiles_of(left.values), _tiles_of(right.values), left.scales, right.scales, sums, out,
        experts, starts, m, n, rows, depth // BLOCK, tiles, len(parts), second, third, _TILE, BAND,
        num_warps=4, num_stages=_STAGES, enable_fp_fusion=False,
    )  # fmt: skip


def dgrad(dy: Int8Parts, weight: Int8Parts, dispatch: Dispatch | None = None) -> torch.Tensor:
    """dY [T, ..] and W^T [K, ..], of the same parts in whole blocks -> dX BF16 [T, K]; of rows that
    are dispatched, by W^T [E K, ..] of each row's expert.
    """
    count = 1 if dispatch is None else len(dispatch.counts)
    shape, device = (len(dy.values), len(weight.values) // count), dy.values.device
    assert dy.parts == weight.parts
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if shape[0]:
        begins = list(accumulate(map(num_blocks, dy.parts[:-1]), initial=0))
        _multiply(dy, weight, out, begins, None if dispatch is None else dispatch.experts)
    return out


def wgrad(
    dy: BalancedRows, x: BalancedRows, grad: torch.Tensor, dispatch: Dispatch | None = None
) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, from dY^T [N, Tp] and X^T [K, Tp]; of rows that are
    dispatched, [E N, K], each expert's.
    """
    count = 1 if dispatch is None else len(dispatch.counts)
    assert grad.shape == (count * len(dy.values), len(x.values))
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    _multiply(dy, x, grad, starts=None if dispatch is None else dispatch.starts)
