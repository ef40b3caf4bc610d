"""Sums over tokens without atomics: each block of tokens leaves its sum, and one kernel adds the
blocks to a gradient.

    grad[c] += sum over blocks b of sums[b, c]

Of a column, ROWS running sums take blocks b = i, i + ROWS, ... in ascending order; a fixed tree
joins them, and one addition brings the total to the gradient.  So a sum's order depends on the
number of blocks alone.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

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
