"""A head of one output: a number for each hidden state, a value or a score.

    y_n   = sum_c h_nc w_c                     FP32
    dh_n  = d_n w                              in the dtype of h
    dw   += sum over n of d_n h_n              FP32

A row's products are summed as those of a norm are (``isobit.kernels.spec.norm.row_sum``), in an
order that depends on the width alone.  A GEMM of one column would choose its order by the number of
rows.  The weight's gradient repeats its bits at a fixed number of threads.
"""

import torch

from isobit.kernels.spec.norm import row_sum


def scalar_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [N, C], weight [C] -> FP32 [N]."""
    return row_sum(hidden.float() * weight.float())[:, 0]


def scalar_head_backward(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of the outputs, FP32 [N] -> that of hidden [N, C]; grad, FP32 [C], += that of
    the weight.
    """
    grad.add_((d[:, None] * hidden.float()).sum(0))
    return (d[:, None] * weight.float()).to(hidden.dtype)
