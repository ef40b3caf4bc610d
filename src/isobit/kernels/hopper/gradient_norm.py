"""The norm of the gradients on a GPU: sums of squares in FP64 and in an order that nothing but a
tensor's size decides.

A tensor is cut into pieces of 2048 elements; program p of P takes pieces p, p + P, .. in this
order, one FP64 sum a lane, then adds its lanes.  A second kernel adds the P sums of a tensor, and
the host those of the tensors, exactly.  The square of an FP32 number is exact in FP64 and cannot
overflow: the norm is finite if and only if every gradient is.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes
# with)

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_PIECE = 2048
_PROGRAMS = 1024


@triton.jit
def _squares_kernel(X, SUMS, n, PIECE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Program p of at most PROGRAMS: its sum to SUMS[p]."""
    element = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    acc = tl.zeros([PIECE], tl.float64)
    for _ in range(tl.program_id(0), tl.cdiv(n, PIECE), PROGRAMS):
        x = tl.load(X + element, mask=element < n, other=0.0).to(tl.float64)
        acc += x * x
        element += PROGRAMS * PIECE
    tl.store(SUMS + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def _add_kernel(SUMS, OUT, PROGRAMS: tl.constexpr):
    """One program a tensor: its PROGRAMS sums to one."""
    tensor = tl.program_id(0)
    tl.store(OUT + tensor, tl.sum(tl.load(SUMS + tensor * PROGRAMS + tl.arange(0, PROGRAMS)), 0))


def squared_norms(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """FP32 tensors, contiguous, of any shapes -> the sum of squares of each, FP64 [tensors] on the
    GPU; NaN or inf where an element is.
    """
    sums = torch.zeros((len(grads), _PROGRAMS), dtype=torch.float64, device=grads[0].device)
    for grad, row in zip(grads, sums, strict=True):
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        assert (
            grad.data_ptr() % 16 == 0
        )  # another alignment would give the kernel another layout, and its sums another order
        n = grad.numel()
        programs = min(triton.cdiv(n, _PIECE), _PROGRAMS)
        _squares_kernel[(programs,)](
            grad, row, n, _PIECE, _PROGRAMS, num_warps=4, enable_fp_fusion=False
        )
    out = torch.empty(len(grads), dtype=torch.float64, device=sums.device)
    _add_kernel[(len(grads),)](sums, out, _PROGRAMS, num_warps=4)
    return out


def gradient_norm(grads: Sequence[torch.Tensor]) -> float:
    """The 2-norm of all gradients together; waits for the device.  FP32 tensors, contiguous, of any
    shapes.
    """
    return math.sqrt(math.fsum(squared_norms(grads).tolist()))
