"""Sums of squares of gradients on a GPU, one for every 128 rows: in FP64 and in an order that
nothing but the size of these rows decides.

The rows of a block lie together.  They are cut into pieces of 16384 elements; a program takes one,
2048 at a time, one FP64 sum a lane, then adds its lanes.  A second kernel adds the sums of a
block's pieces, ascending.  So a slice of a tensor at a multiple of 128 rows gives the sums that it
has in the whole.  The square of an FP32 number is exact in FP64 and cannot overflow: a sum is
finite if and only if every element is.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from isobit.precision.formats import BLOCK
from isobit.precision.quant_tensor import num_blocks

_PIECE = 16384
_WIDTH = 2048
_BLOCKS = 128  # of a program that adds pieces


@triton.jit(do_not_specialize=["stride"])
def _squares_kernel(X, SUMS, stride, SIZE: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr):
    """One program a piece of a block of SIZE elements: its sum to SUMS[piece, block].

    SIZE is known to the compiler: whether the end of a block is aligned decides the layout, and so
    the order of the lanes.
    """
    pieces: tl.constexpr = (SIZE + PIECE - 1) // PIECE
    block, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    start = X + block.to(tl.int64) * SIZE
    acc = tl.zeros([WIDTH], tl.float64)
    for first in tl.static_range(0, PIECE, WIDTH):
        element = piece * PIECE + first + tl.arange(0, WIDTH)
        if SIZE % PIECE == 0:
            x = tl.load(start + element)
        else:
            x = tl.load(start + element, mask=element < SIZE, other=0.0)
        wide = x.to(tl.float64)
        acc += wide * wide
    tl.store(SUMS + piece.to(tl.int64) * stride + block, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["blocks", "pieces"])
def _add_kernel(SUMS, OUT, blocks, pieces, BLOCKS: tl.constexpr):
    """One program BLOCKS blocks: their pieces, ascending; a zero for a piece that is not there
    changes nothing.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    at = SUMS + block
    acc = tl.zeros([BLOCKS], tl.float64)
    for _ in range(pieces):
        acc += tl.load(at, mask=inside, other=0.0)
        at += blocks
    tl.store(OUT + block, acc, mask=inside)


def gradient_squares(grads: Sequence[torch.Tensor]) -> list[float]:
    """The sums of all blocks of 128 rows, tensor by tensor, which this waits for; NaN or infinite
    where an element is.  FP32 tensors, contiguous, of any shapes; one without rows has none.
    """
    grads = [grad for grad in grads if grad.numel()]
    total = sum(num_blocks(len(grad)) for grad in grads)
    if not total:
        return []
    pieces = max(triton.cdiv(BLOCK * grad[0].numel(), _PIECE) for grad in grads)
    sums = torch.zeros((pieces, total), dtype=torch.float64, device=grads[0].device)
    first = 0
    for grad in grads:
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        assert grad.data_ptr() % 16 == 0  # another alignment would give the kernel another layout
        rows, width = len(grad), grad[0].numel()
        whole = rows // BLOCK
        _launch(grad, sums[:, first:], whole, BLOCK * width)
        _launch(grad[whole * BLOCK :], sums[:, first + whole :], 1, rows % BLOCK * width)
        first += num_blocks(rows)
    out = torch.empty(total, dtype=torch.float64, device=sums.device)
    _add_kernel[(triton.cdiv(total, _BLOCKS),)](sums, out, total, pieces, _BLOCKS, num_warps=4)
    return out.tolist()


def _launch(x: torch.Tensor, sums: torch.Tensor, blocks: int, size: int) -> None:
    """The pieces of so many blocks of ``size`` elements."""
    if not blocks * size:
        return
    piece = min(_PIECE, triton.next_power_of_2(size))
    _squares_kernel[(blocks * triton.cdiv(size, piece),)](
        x,
        sums,
        sums.stride(0),
        size,
        piece,
        min(_WIDTH, piece),
        num_warps=4,
        enable_fp_fusion=False,
    )
