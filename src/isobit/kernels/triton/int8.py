"""Products of INT8 rows, forward and backward, with the bits of ``isobit.kernels.spec.linear``.

    Y[m, n] = BF16((float(sum over all k of X[m, k] W[n, k]) * scale_x[m]) * scale_w[n])

The sum is an INT32, which is exact in any order below K = 133,000, so no tile, split, generation of
cards or instruction changes a bit.  Tensor cores multiply by ``mma.sync``, which every card since
Ampere has, or by ``wgmma`` where a kernel is compiled for Hopper.

    up to 4 rows   by the multiprocessors' own products of four numbers (``Dots``)
    more           in tiles (``Tiles``).  W's rows are the left operand up to 64 rows; K is cut in
                   parts where tiles are few, whose sums a second kernel adds

Tiles that ``cut_up`` chooses take at most 99 KiB of shared memory, which GeForce cards have.
``isobit.kernels.hopper.int8`` chooses larger ones.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.sizes import MOST_SPLITS, SPLIT_PROGRAMS
from isobit.precision.quant_tensor import BLOCK, INT8_SUMMANDS, Int8Rows, num_blocks

_BLOCKS_OF_SPLIT = 4  # of 128 along K, at least: fewer would not fill the pipeline
_WIDTH = 1024  # columns of a program that adds splits


@dataclass(frozen=True, slots=True)
class Dots:
    """The division of a product of few tokens, without tiles."""

    rows: int  # of W
    words: int = 256  # of four numbers, that are read at once
    warps: int = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """The division of a product of more tokens."""

    block_m: int  # tokens
    block_n: int
    splits: int  # of K
    stages: int
    swaps: bool  # whether W is the left operand
    depth: int = BLOCK  # numbers of K that are read at once
    warps: int = 4


Cut = Dots | Tiles


def cut_up(m: int, n: int, k: int) -> Cut:
    """The division of a product that suits most cards; no choice changes a bit."""
    if k % 16:  # rows that are not loaded by vectors would not fit the registers of a large tile
        return Tiles(16, 64, 1, 1, swaps=True)
    return Dots(2 if m <= 2 else 4) if m <= 4 else tiles(m, n, k)


def tiles(m: int, n: int, k: int, adds: bool = False) -> Tiles:
    """Tiles of any number of rows.  Where a product ``adds``, K is in one part, and eight warps
    have the registers for what is added.
    """
    if m > 64:
        large = triton.cdiv(m, 128) * triton.cdiv(n, 128)
        if m <= 128 or large < SPLIT_PROGRAMS:
            return Tiles(64, 128, 1, 3, swaps=False)
        return Tiles(128, 128, 1, 3, swaps=False, warps=8 if adds else 4)
    block_m = max(16, triton.next_power_of_2(m))
    if n > 64 * SPLIT_PROGRAMS:
        return Tiles(block_m, 64, 1, 4, swaps=True)
    if m <= 32:
        return Tiles(block_m, 32, 1, 4, swaps=True, depth=whole_depth(k, 512), warps=2)
    parts = 1 if adds else number_of_splits(n, k, MOST_SPLITS, SPLIT_PROGRAMS)
    return Tiles(block_m, 32, parts, 6, swaps=True, warps=2)


def whole_depth(k: int, most: int) -> int:
    """The largest power of two from ``BLOCK`` to ``most`` that divides k, or ``BLOCK``."""
    return max(BLOCK, min(most, k & -k))


def number_of_splits(n: int, k: int, most: int, programs: int) -> int:
    """Parts of K, a power of two, until there are so many programs of 64 columns."""
    splits = 1
    while 2 * splits <= min(most, num_blocks(k) // _BLOCKS_OF_SPLIT):
        if splits * triton.cdiv(n, 64) >= programs:
            break
        splits *= 2
    return splits


@triton.jit
def scaled(sums, x_scale, w_scale):
    """INT32 sums -> FP32, which a store rounds to BF16 where the output is."""
    return sums.to(tl.float32) * x_scale * w_scale


@triton.jit(do_not_specialize=["m"])
def _gemm_kernel(
    X, W, X_SCALE, W_SCALE, OUT, m, n, k, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    SWAPS: tl.constexpr, WHOLE_K: tl.constexpr, BEFORE=None, ADDS: tl.constexpr = False,
    ROW: tl.constexpr = None,
):  # fmt: skip
    """One program a tile of OUT, BF16 or FP32 [m, n], or of one of SPLITS parts of K, INT32
    [SPLITS, m, n]; bands of 8 tile rows share W in the L2 cache.

    If it ADDS, it is added to BEFORE, FP32 [m, n] as OUT, or to zero.  The rows of X and W are ROW
    apart where that is not k.
    """
    row_size = k if ROW is None else ROW
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    row = band * 8 + tl.program_id(0) % (8 * tiles_n) % height
    row = row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % (8 * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(k, DEPTH)
    first = 0
    if SPLITS > 1:
        each = tl.cdiv(blocks, SPLITS)
        first = tl.program_id(1) * each
        blocks = tl.minimum(blocks, first + each)
    depth = first * DEPTH + tl.arange(0, DEPTH)
    x_place = (row % m).to(tl.int64) * row_size  # rows beyond the matrix repeat others, not stored
    w_place = (column % n).to(tl.int64) * row_size
    if SWAPS:
        x_scale = tl.load(X_SCALE + row % m)  # behind the loop they would be waited for
        w_scale = tl.load(W_SCALE + column % n)
        left, right = W + w_place[:, None] + depth[None, :], X + x_place[None, :] + depth[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        left, right = X + x_place[:, None] + depth[None, :], W + w_place[None, :] + depth[:, None]
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for block in range(first, blocks):
        if WHOLE_K:
            a = tl.load(left)
            b = tl.load(right)
        else:
            rest = k - block * DEPTH
            a = tl.load(left, mask=tl.arange(0, DEPTH)[None, :] < rest, other=0)
            b = tl.load(right, mask=tl.arange(0, DEPTH)[:, None] < rest, other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        left += DEPTH
        right += DEPTH
    if SWAPS:
        sums = tl.trans(sums)
    inside = (row < m)[:, None] & (column < n)[None, :]
    place = OUT + row[:, None].to(tl.int64) * out_row + column[None, :]
    if SPLITS > 1:
        tl.store(place + tl.program_id(1).to(tl.int64) * m * n, sums, mask=inside)
    else:
        if not SWAPS:
            x_scale = tl.load(X_SCALE + row % m)
            w_scale = tl.load(W_SCALE + column % n)
        made = scaled(sums, x_scale[:, None], w_scale[None, :])
        if ADDS:
            before = 0.0  # which takes the sign from a zero
            if BEFORE is not None:
                place_before = BEFORE + row[:, None].to(tl.int64) * out_row + column[None, :]
                before = tl.load(place_before, mask=inside, other=0.0)
            made = before + made
        tl.store(place, made, mask=inside)


@triton.jit
def _dot4(a, b, c):
    """Four INT8 products of INT32 a and b, added to INT32 c."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["m"])
def _dots_kernel(
    X, W, X_SCALE, W_SCALE, OUT, m, n, out_row, K: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program ROWS columns of OUT for all of m <= BLOCK_M tokens.  X and W are words of four
    numbers, K of them a row; the four words that a thread loads at once share a sum.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, WIDTH)[None, None, :]
    w_place = W + (row % n).to(tl.int64)[:, None, None] * K + depth
    x_place = X + (token % m)[None, :, None] * K + depth
    x_scale = tl.load(X_SCALE + token % m)  # behind the loop they would be waited for
    w_scale = tl.load(W_SCALE + row % n)
    sums = tl.zeros([ROWS, BLOCK_M, WIDTH // 4], tl.int32)
    for first in range(0, K, WIDTH):
        if K % WIDTH:
            w = tl.load(w_place + first, mask=depth < K - first, other=0)
            x = tl.load(x_place + first, mask=depth < K - first, other=0)
        else:
            w = tl.load(w_place + first)
            x = tl.load(x_place + first)
        w1, w2 = tl.split(tl.reshape(w, [ROWS, 1, WIDTH // 4, 2, 2]))
        x1, x2 = tl.split(tl.reshape(x, [1, BLOCK_M, WIDTH // 4, 2, 2]))
        w11, w12 = tl.split(w1)
        w21, w22 = tl.split(w2)
        x11, x12 = tl.split(x1)
        x21, x22 = tl.split(x2)
        sums = _dot4(w22, x22, _dot4(w21, x21, _dot4(w12, x12, _dot4(w11, x11, sums))))
    made = scaled(tl.sum(sums, 2), x_scale[None, :], w_scale[:, None])
    place = OUT + token[None, :].to(tl.int64) * out_row + row[:, None]
    tl.store(place, made, mask=(row < n)[:, None] & (token < m)[None, :])


@triton.jit(do_not_specialize=["m"])
def _add_splits_kernel(
    SUMS, X_SCALE, W_SCALE, OUT, m, n, out_row, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):
    """One program WIDTH columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < n
    total = tl.zeros([WIDTH], tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(SUMS + (split * m + row) * n + column, mask=inside, other=0)
    w_scale = tl.load(W_SCALE + column, mask=inside, other=0.0)
    made = scaled(total, tl.load(X_SCALE + row), w_scale)
    tl.store(OUT + row * out_row + column, made, mask=inside)


def int8_gemm_nt(
    x: Int8Rows, weight: Int8Rows, cut: Cut | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """X [M, K], W [N, K], contiguous -> X W^T, BF16 [M, N]; or in the dtype of ``out`` [M, N],
    whose rows may lie further apart.
    """
    (m, k), n = x.values.shape, len(weight.values)
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.values.device)
    if m:
        multiply(x, weight, cut or cut_up(m, n, k), out)
    return out


def multiply(x: Int8Rows, weight: Int8Rows, cut: Cut, out: torch.Tensor) -> None:
    """``int8_gemm_nt`` of at least one row."""
    assert all(one.values.is_contiguous() for one in (x, weight))
    (m, k), n = x.values.shape, len(weight.values)
    assert k <= INT8_SUMMANDS, k
    assert out.shape == (m, n)
    assert out.stride(1) == 1
    if isinstance(cut, Dots):
        _dots_kernel[(triton.cdiv(n, cut.rows),)](
            x.values.view(torch.int32), weight.values.view(torch.int32), x.scales, weight.scales,
            out, m, n, out.stride(0), k // 4, triton.next_power_of_2(m), cut.rows,
            min(cut.words, triton.next_power_of_2(k // 4)),
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return
    if cut.splits == 1:
        _multiply_tiles(x, weight, cut, out)
        return
    sums = torch.empty((cut.splits, m, n), dtype=torch.int32, device=out.device)
    _multiply_tiles(x, weight, cut, sums)
    width = min(_WIDTH, triton.next_power_of_2(n))
    _add_splits_kernel[(m, triton.cdiv(n, width))](
        sums, x.scales, weight.scales, out, m, n, out.stride(0), cut.splits, width,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def add_product(
    x: Int8Rows, weight: Int8Rows, out: torch.Tensor, before: torch.Tensor | None = None
) -> None:
    """out = BEFORE + X W^T: out BF16 or FP32 [M, N], contiguous; BEFORE FP32 [M, N], perhaps out
    itself, or zeros.  X [M, K] and W [N, K] may be columns of larger matrices, of equal rows.
    """
    (m, k), n, row = x.values.shape, len(weight.values), x.values.stride(0)
    assert out.shape == (m, n)
    assert all(one.is_contiguous() for one in (out, out if before is None else before))
    assert row == weight.values.stride(0)
    cut = tiles(m, n, k, adds=True)
    _multiply_tiles(x, weight, cut, out, before, True, None if row == k else row)


def _multiply_tiles(
    x: Int8Rows,
    weight: Int8Rows,
    cut: Tiles,
    out: torch.Tensor,
    before: torch.Tensor | None = None,
    adds: bool = False,
    row: int | None = None,
) -> None:
    (m, k), n = x.values.shape, len(weight.values)
    grid = (triton.cdiv(m, cut.block_m) * triton.cdiv(n, cut.block_n), cut.splits)
    _gemm_kernel[grid](
        x.values, weight.values, x.scales, weight.scales, out, m, n, k, out.stride(-2),
        cut.block_m, cut.block_n, cut.depth, cut.splits, cut.swaps, k % cut.depth == 0,
        before, adds, row, num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip
