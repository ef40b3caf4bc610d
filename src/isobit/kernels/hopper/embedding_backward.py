"""The backward of the embedding on Hopper: rows of equal ids are added in the order of their
tokens, without atomics.

    grad[v] += sum over tokens t with token_ids[t] = v, ascending, of d_hidden[t]     FP32

A stable sort brings equal ids together and keeps their tokens in order.  A program looks at one
place of the sorted ids: if a run of equal ids begins there, it adds the whole run, starting from
zero, and then adds that to the gradient's row, which it alone writes. These are the bits of
``torch.ops.aten.embedding_dense_backward`` on the CPU.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

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
    """Columns of a program, a power of two, for rows of so many."""
    return min(_WIDEST, triton.next_power_of_2(columns))


def embedding_backward(d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor) -> None:
    """d_hidden BF16 [T, C] and token_ids int64 [T], contiguous -> added to the rows of FP32 [V, C],
    in place.  No host synchronisation.
    """
    tokens, columns = d_hidden.shape
    if not tokens:
        return
    ids, order = torch.sort(token_ids, stable=True)
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    width = columns_of_program(columns)
    _run_kernel[(tokens, triton.cdiv(columns, width))](
        ids, order, ends, d_hidden, grad, columns, width, _UNROLLED, num_warps=4
    )
