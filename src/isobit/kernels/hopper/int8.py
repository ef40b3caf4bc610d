"""INT8 on Hopper: the linears' product.

It is that of ``isobit.kernels.triton.int8``; lm_head's stays in FP32.  Tiles and splits of
K may depend on M: a row has the specification's bits in every batch.

    up to 4      by the multiprocessors' own products of four numbers, whose warps read 512
                 neighbouring bytes of a row of W at once: faster than any tiles
    up to 128    in tiles so small that all multiprocessors read W, whose rows are the left operand
                 of the tensor cores, unless tokens and rows are many; from 33 on K is read in
                 several parts at once if tiles are too few, whose sums a second kernel adds
    more         persistent programs, which ask the copy engine for the tiles of their next product
                 while they scale and store the last
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isobit.kernels.hopper.sizes import (
    MOST_SPLIT_ROWS,
    MOST_SPLITS,
    PROGRAMS,
    SPLIT_PROGRAMS,
    UNSPLIT_ROWS,
)
from isobit.kernels.triton.int8 import (
    Dots,
    Tiles,
    multiply,
    number_of_splits,
    scaled,
    whole_depth,
)
from isobit.precision.quant_tensor import BLOCK, Int8Rows

_ONE_WAVE = 64 * PROGRAMS  # rows of W: a tile of 64 for each multiprocessor
BAND = 16  # rows of tiles that share W in the L2 cache


@dataclass(frozen=True, slots=True)
class Persistent:
    """The division of a product of many tokens."""

    block_m: int  # tokens
    block_n: int
    stages: int


Cut = Dots | Tiles | Persistent


def cut_up(m: int, n: int, k: int) -> Cut:
    """The division of a product that keeps the multiprocessors busy; no choice changes a bit."""
    if k % 16:  # rows that are not loaded by vectors would not fit the registers of a large tile
        return Tiles(16, 64, 1, 1, swaps=True)
    if m <= 4:
        return Dots(2 if m <= 2 else 4)
    if m <= UNSPLIT_ROWS:
        return _unsplit(m, n, k)
    return _split(m, n, k) if m <= MOST_SPLIT_ROWS else _persistent(m, n)


def _unsplit(m: int, n: int, k: int) -> Tiles:
    """The smallest tiles of W that all run at once."""
    block_m = max(16, triton.next_power_of_2(m))
    if n <= 16 * PROGRAMS:
        return Tiles(block_m, 16, 1, 6, swaps=True, depth=whole_depth(k, 512), warps=2)
    if n <= 32 * PROGRAMS:
        return Tiles(block_m, 32, 1, 6, swaps=True, depth=whole_depth(k, 512))
    return Tiles(
        block_m, 64, 1, 6, swaps=True, depth=whole_depth(k, 256 if n <= _ONE_WAVE else 128)
    )


def _split(m: int, n: int, k: int) -> Tiles:
    """K in parts where tiles of 64 rows of W are few."""
    if n > _ONE_WAVE and m <= 64:
        return Tiles(64, 64, 1, 6, swaps=True)
    if n > _ONE_WAVE:
        return Tiles(64 if n < 256 * PROGRAMS else 128, 128, 1, 3, swaps=False)
    splits = number_of_splits(n, k, MOST_SPLITS, SPLIT_PROGRAMS)
    if m <= 64:
        return Tiles(64, 64, splits, 4, swaps=True, depth=whole_depth(k, 256))
    return Tiles(128, 64, splits, 6, swaps=True)


def _persistent(m: int, n: int) -> Persistent:
    """Large tiles, unless they leave more of the last round of programs idle than smaller ones,
    which take 0.55 of their time.
    """
    slots = 2 * PROGRAMS
    if triton.cdiv(m, 64) * triton.cdiv(n, 64) <= slots:
        return Persistent(64, 64, 6)
    columns = triton.cdiv(n, 128)
    large, small = (triton.cdiv(m, block) * columns for block in (128, 64))
    rounds = triton.cdiv(large, slots), 0.55 * triton.cdiv(small, slots)
    if large > 0.75 * slots and rounds[0] <= rounds[1]:
        return Persistent(128, 128, 3)
    return Persistent(64, 128, 4)


@triton.jit(do_not_specialize=["m"])
def _persistent_kernel(
    X, W, X_SCALE, W_SCALE, OUT, m, n, k, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """X and W are descriptors of [m, k] and [n, k]; beyond them the copy engine gives zeros."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        band = tile // (BAND * tiles_n)
        height = tl.minimum(tiles_m - band * BAND, BAND)
        first_row = (band * BAND + tile % (BAND * tiles_n) % height) * BLOCK_M
        first_column = tile % (BAND * tiles_n) // height * BLOCK_N
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for block in range(0, tl.cdiv(k, 128)):
            a = X.load([first_row, block * 128])
            b = W.load([first_column, block * 128])
            sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        x_scale = tl.load(X_SCALE + row % m)
        w_scale = tl.load(W_SCALE + column % n)
        place = OUT + row[:, None].to(tl.int64) * out_row + column[None, :]
        inside = (row < m)[:, None] & (column < n)[None, :]
        tl.store(place, scaled(sums, x_scale[:, None], w_scale[None, :]), mask=inside)


def int8_gemm_nt(
    x: Int8Rows, weight: Int8Rows, cut: Cut | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """X [M, K], W [N, K], contiguous -> X W^T, BF16 [M, N]; or in the dtype of ``out`` [M, N],
    whose rows may lie further apart.
    """
    assert all(one.values.is_contiguous() for one in (x, weight))
    (m, k), n = x.values.shape, weight.values.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.values.device)
    assert out.shape == (m, n)
    assert out.stride(1) == 1
    if not m:
        return out
    cut = cut or cut_up(m, n, k)
    if isinstance(cut, Persistent):
        tiles = triton.cdiv(m, cut.block_m) * triton.cdiv(n, cut.block_n)
        _persistent_kernel[(min(2 * PROGRAMS, tiles),)](
            TensorDescriptor(x.values, [m, k], [k, 1], [cut.block_m, BLOCK]),
            TensorDescriptor(weight.values, [n, k], [k, 1], [cut.block_n, BLOCK]),
            x.scales, weight.scales, out, m, n, k, out.stride(0), cut.block_m, cut.block_n, BAND,
            num_warps=4, num_stages=cut.stages, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    multiply(x, weight, cut, out)
    return out
