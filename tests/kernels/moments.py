"""Moments of AdamW before its first step, in each of their formats."""

import torch
from torch import Tensor

from isobit.kernels.noise import FIRST, SECOND, num_groups

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (FIRST, SECOND),
}


def zero_moments(shape: tuple[int, ...], kind: str) -> list[Tensor]:
    """The first and the second moments of a tensor, on the host, and the scales that both have in 8
    bits.
    """
    moments = [torch.zeros(shape, dtype=dtype) for dtype in DTYPES[kind]]
    if kind == "fp8":
        groups = num_groups(moments[0].numel())
        moments += [torch.zeros(groups, dtype=torch.uint8) for _ in range(2)]
    return moments
