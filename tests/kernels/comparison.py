"""How tests compare tensors and quantised operands, whatever devices they are on."""

from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of every number as an integer, on the host: a NaN equals itself, and zeros of both
    signs differ.
    """
    return x.cpu().contiguous().view(_INTEGERS[x.element_size()])


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, or two operands in 8 bits with their scales, have the same dtypes and
    bits; None equals None alone.
    """
    if a is None or b is None:
        return a is b
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    return same(a.values, b.values) and same(a.scales, b.scales)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of ``exact``, in FP64, where ``ours`` is."""
    exact = exact.to(ours.device, torch.float64)
    return float((ours.double() - exact).norm() / exact.norm())
