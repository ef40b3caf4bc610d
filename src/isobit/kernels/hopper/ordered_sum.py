"""Sums of gradients in the order of their micro-batches, on a GPU: each number is read once and
the total is read and written once, where one addition after the other would do that for every
addend.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WIDTH = 4096
_ADDENDS = 8  # of one launch


@triton.jit
def _add_kernel(TOTAL, A0, A1, A2, A3, A4, A5, A6, A7, n, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """One program WIDTH elements, of the first COUNT addends."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < n
    total = tl.load(TOTAL + element, mask=inside) + tl.load(A0 + element, mask=inside)
    if COUNT > 1:
        total += tl.load(A1 + element, mask=inside)
    if COUNT > 2:
        total += tl.load(A2 + element, mask=inside)
    if COUNT > 3:
        total += tl.load(A3 + element, mask=inside)
    if COUNT > 4:
        total += tl.load(A4 + element, mask=inside)
    if COUNT > 5:
        total += tl.load(A5 + element, mask=inside)
    if COUNT > 6:
        total += tl.load(A6 + element, mask=inside)
    if COUNT > 7:
        total += tl.load(A7 + element, mask=inside)
    tl.store(TOTAL + element, total, mask=inside)


def add_in_order(total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
    """See ``isobit.kernels.spec.ordered_sum``: contiguous, of as many elements each."""
    n = total.numel()
    for tensor in (total, *addends):
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert tensor.numel() == n
    if not n:
        return
    for first in range(0, len(addends), _ADDENDS):
        some = list(addends[first : first + _ADDENDS])
        unread = [total] * (_ADDENDS - len(some))
        grid = (triton.cdiv(n, _WIDTH),)
        _add_kernel[grid](total, *some, *unread, n, len(some), _WIDTH, num_warps=8)
