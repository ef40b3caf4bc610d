"""Sums of gradients in the order of their micro-batches."""

from collections.abc import Sequence

import torch


def add_in_order(total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
    """((total + a0) + a1) + .., element by element in FP32, in place."""
    for addend in addends:
        total.add_(addend)
