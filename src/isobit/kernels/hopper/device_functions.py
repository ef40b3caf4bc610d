"""Sums over tokens without atomics: each block of tokens leaves its sum, and one kernel adds the
blocks to a gradient.

    grad[c] += sum over blocks b of sums[b, c]

Of a column, ROWS running sums take blocks b = i, i + ROWS, ... in ascending order; a fixed tree
joins them, and one addition brings the total to the gradient.  So a sum's order depends on the
number of blocks alone.

``isobit.kernels.spec.qkv`` of vectors in registers, with its bits, for the kernels between
the qkv GEMM and attention.

A vector is two halves there, since the rotation pairs j with D / 2 + j, and a half lies in a few
neighbouring threads of one warp: pairs that are close stand in one thread, the others cost a
shuffle.

The parts of a fused matrix, as kernels and products take them.

The grid of 128x128 blocks begins anew at each part.  Behind a part of whole blocks it goes on as if
there were no border, so that such parts are taken together with what follows: a *run*.  A model
whose sizes are multiples of 128 has one run a matrix.

DGrad contracts over the rows of a matrix, along which its two operands then share the grid.  Both
are laid out in whole blocks: where a block is short, zeros fill it up, N numbers become
``padded_size``.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from isobit.precision.quant_tensor import BLOCK, num_blocks

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


_ROWS = 128  # blocks that a program reads at once: enough to hide the memory's latency
_COLUMNS = 32  # columns of a program: one line of 128 bytes


@triton.jit(do_not_specialize=["blocks"])
def _add_kernel(SUMS, GRAD, blocks, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program COLUMNS columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, blocks, ROWS):
        b = first + tl.arange(0, ROWS)
        at = SUMS + b.to(tl.int64)[:, None] * C + column[None, :]
        total += tl.load(at, mask=(b < blocks)[:, None] & inside[None, :], other=0.0)
    grad = tl.load(GRAD + column, mask=inside, other=0.0) + tl.sum(total, 0)
    tl.store(GRAD + column, grad, mask=inside)


def add_block_sums(sums: torch.Tensor, grad: torch.Tensor) -> None:
    """FP32 [blocks, C] is added over its blocks to FP32 [C], in place."""
    blocks, columns = sums.shape
    _add_kernel[(triton.cdiv(columns, _COLUMNS),)](
        sums, grad, blocks, columns, _ROWS, _COLUMNS, num_warps=4
    )


@triton.jit
def _pairs(x, APART: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr):
    """FP32 [N, SIZE]: (a, b) -> (a + b, a - b) of numbers that are so far apart."""
    pairs: tl.constexpr = SIZE // (2 * APART)
    bits = tl.reshape(x, [N, pairs, 2, APART]).to(tl.int32, bitcast=True)
    # A sum of two integers less one of them is the other one: Triton has sums along an axis, which
    # become shuffles, and no way to ask for the neighbour.
    other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    sign = (tl.arange(0, 2) << 31)[None, None, :, None]
    own = (bits ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(other + own, [N, SIZE])


@triton.jit
def hadamard(x1, x2, N: tl.constexpr, HALF: tl.constexpr):
    """The halves of N vectors, FP32 [N, HALF] -> those of H x."""
    for level in tl.static_range(6 if HALF == 64 else 5):
        x1 = _pairs(x1, 1 << level, N, HALF)
        x2 = _pairs(x2, 1 << level, N, HALF)
    return x1 + x2, x1 - x2


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of a matrix whose blocks are all whole, but perhaps the last."""

    first: int
    """Row of the matrix."""
    size: int
    """Rows."""
    first_block: int
    """Of the matrix's blocks."""

    @property
    def blocks(self) -> int:
        """Blocks along the rows."""
        return num_blocks(self.size)


@cache
def runs(parts: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of a matrix with so many rows in each part."""
    made: list[Run] = []
    first = size = first_block = 0
    for part in parts:
        size += part
        if size % BLOCK:
            made.append(Run(first, size, first_block))
            first, size, first_block = first + size, 0, first_block + num_blocks(size)
    return (*made, Run(first, size, first_block)) if size else tuple(made)


def padded_size(parts: tuple[int, ...]) -> int:
    """Rows of a matrix with these parts in whole blocks."""
    return BLOCK * sum(run.blocks for run in runs(parts))
