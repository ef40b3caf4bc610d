"""The scalar head: a number for each hidden state.

    y_n   = sum_c h_nc w_c                     FP32
    dh_n  = d_n w                              FP32, rounded to BF16 once
    dw   += sum over n of d_n h_n              FP32

One program takes a row whole, in a layout that depends on the width alone.  The backward's sums are
ordered as in RMSNorm's (``isobit.kernels.triton.pointwise``).
"""

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.device_functions import add_block_sums
from isobit.kernels.triton.pointwise import BLOCKS, layout

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)


@triton.jit(do_not_specialize=["count"])
def _output_kernel(
    HIDDEN, WEIGHT, OUT, count, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program ROWS rows of C channels padded to WIDTH."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    inside = (n < count)[:, None] & (column < C)[None, :]
    at = n[:, None] * C + column[None, :]
    hidden = tl.load(HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + n, tl.sum(hidden * weight, 1), mask=n < count)


@triton.jit(do_not_specialize=["count", "rows_of_block"])
def _backward_kernel(
    HIDDEN, WEIGHT, D, D_HIDDEN, SUMS, count, rows_of_block, C: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """One program a block of rows, ROWS at a time."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum((block + 1) * rows_of_block, count)
    for first in range(block * rows_of_block, end, ROWS):
        n = first + tl.arange(0, ROWS)
        inside = (n < end)[:, None] & (column < C)[None, :]
        at = n[:, None] * C + column[None, :]
        d = tl.load(D + n, mask=n < end, other=0.0)[:, None]
        hidden = tl.load(HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(D_HIDDEN + at, (d * weight).to(tl.bfloat16), mask=inside)
        sums += tl.sum(d * hidden, 0)
    tl.store(SUMS + block * C + column, sums, mask=column < C)


def scalar_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden BF16 [N, C] and weight BF16 [C], contiguous -> FP32 [N]."""
    count, columns = hidden.shape
    _check_alignment(hidden, weight)
    out = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count:
        width, rows, warps = layout(columns)
        _output_kernel[(triton.cdiv(count, rows),)](
            hidden, weight, out, count, columns, width, rows, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def scalar_head_backward(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of the outputs, FP32 [N] -> that of hidden, BF16 [N, C]; adds that of the weight
    to ``grad``, FP32 [C].  Repeats its bits at the same sizes.
    """
    count, columns = hidden.shape
    _check_alignment(hidden, weight)
    d_hidden = torch.empty_like(hidden)
    if not count:
        return d_hidden
    width, rows, warps = layout(columns)
    rows_of_block = triton.cdiv(triton.cdiv(count, BLOCKS), rows) * rows
    blocks = triton.cdiv(count, rows_of_block)
    sums = torch.empty((blocks, columns), dtype=torch.float32, device=hidden.device)
    _backward_kernel[(blocks,)](
        hidden, weight, d, d_hidden, sums, count, rows_of_block, columns, width, rows,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    add_block_sums(sums, grad)
    return d_hidden


def _check_alignment(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Another alignment would give the kernels another layout, and their sums another order."""
    assert hidden.is_contiguous()
    assert hidden.data_ptr() % 16 == weight.data_ptr() % 16 == 0
