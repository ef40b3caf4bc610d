"""Functions that several kernels share: sums over blocks, the Hadamard product, and runs of parts.

**Sums over tokens** without atomics: each block of tokens leaves its sum, and ``add_block_sums``
computes grad[c] += sum over blocks b of sums[b, c].  In a column, ROWS running sums take the blocks
b = i, i + ROWS, ... in ascending order, and a fixed tree joins them: the order depends on the
number of blocks alone.

**Hadamard.**  The product of ``isobit.kernels.spec.qkv`` of vectors in registers, with its bits.  A
vector is two halves, since the rotation pairs j with D / 2 + j, and a half lies in a few
neighbouring threads of one warp: close pairs are in one thread, the others cost a shuffle.

**Runs.**  The grid of 128x128 blocks begins anew at each part of a fused matrix.  Parts of whole
blocks are taken together with what follows, as a *run*: if all sizes are multiples of 128, a matrix
is one run.  DGrad contracts over the rows of a matrix, so both its operands are laid out in whole
blocks, with zeros behind short ones: N rows become ``padded_size``.
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
    """grad FP32 [C] += the sum of FP32 [blocks, C] over its blocks."""
    blocks, columns = sums.shape
    _add_kernel[(triton.cdiv(columns, _COLUMNS),)](
        sums, grad, blocks, columns, _ROWS, _COLUMNS, num_warps=4
    )


@triton.jit
def _pairs(x, APART: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr):
    """FP32 [N, SIZE]: (a, b) -> (a + b, a - b) of numbers that are APART."""
    pairs: tl.constexpr = SIZE // (2 * APART)
    bits = tl.reshape(x, [N, pairs, 2, APART]).to(tl.int32, bitcast=True)
    # The sum of two integers minus one of them is the other: Triton has sums along an axis, which
    # become shuffles, but no access to a neighbour.
    other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    sign = (tl.arange(0, 2) << 31)[None, None, :, None]
    own = (bits ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(other + own, [N, SIZE])


@triton.jit
def hadamard(x1, x2, N: tl.constexpr, HALF: tl.constexpr):
    """The halves of N vectors, FP32 [N, HALF] -> those of H x."""
    for level in tl.static_range(7 if HALF == 128 else 6 if HALF == 64 else 5):
        x1 = _pairs(x1, 1 << level, N, HALF)
        x2 = _pairs(x2, 1 << level, N, HALF)
    return x1 + x2, x1 - x2


@triton.jit
def rotated(x, N: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """FP32 [N, SIZE] -> x H, H of blocks of 2^LEVELS columns."""
    for level in tl.static_range(LEVELS):
        x = _pairs(x, 1 << level, N, SIZE)
    return x


@triton.jit
def rotated_row(x, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """``rotated`` of one row, FP32 [SIZE]."""
    return tl.reshape(rotated(tl.reshape(x, [1, SIZE]), 1, SIZE, LEVELS), [SIZE])


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a matrix whose blocks are whole, except perhaps the last."""

    first: int  # row of the matrix
    size: int  # rows
    first_block: int  # of the matrix's blocks

    @property
    def blocks(self) -> int:
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
