"""AdamW in numbers: what the elements of a tensor have in common in one update, the formats of the
moments, and what their rounding is keyed by.  ``isobit.kernels.spec.adamw`` has the equation.
"""

import math
from dataclasses import dataclass

import torch

from isobit.kernels.noise import splitmix64_of

GROUP = 128
FIRST, SECOND = torch.float8_e4m3fn, torch.uint8
"""Formats of the codes of m and of sqrt(v)."""


def num_groups(elements: int) -> int:
    """The scales of so many elements; the last group may be short."""
    return -(-elements // GROUP)


@dataclass(frozen=True, slots=True)
class AdamWFactors:
    """What the elements of a tensor have in common; every figure is rounded to FP32 where it is
    used.
    """

    clip: float
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float  # 1 - beta2
    root: float  # 1 / sqrt(1 - beta2^t)
    epsilon: float
    size: float  # rate / (1 - beta1^t)
    decay: float  # rate * weight_decay

    @classmethod
    def of(
        cls,
        rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        step: int,
        clip: float,
    ) -> "AdamWFactors":
        """The factors of step 1, 2, .."""
        assert step >= 1
        root = 1 / math.sqrt(1 - beta2**step)
        return cls(
            clip,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            root,
            epsilon,
            rate / (1 - beta1**step),
            rate * weight_decay,
        )


def noise_key(seed: int, step: int, tensor: int) -> int:
    """The seed of one tensor's noise in one step: a signed 64-bit integer."""
    return splitmix64_of(splitmix64_of(seed, step), tensor)


def check_moments(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    key: int | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    first_element: int,
) -> None:
    """Assert that the tensors of an update go together: one shape, and the formats of the moments
    that a key and scales belong to; and that a slice begins where a group of 8-bit moments does.
    """
    assert first_element % GROUP == 0
    for x in (master, grad, exp_avg, exp_avg_sq):
        assert x.is_contiguous()
        assert (x.shape, x.device) == (master.shape, master.device)
    assert master.dtype == grad.dtype == torch.float32
    wide = torch.float32 if key is None else torch.bfloat16
    assert key is not None or scales is None
    assert (exp_avg.dtype, exp_avg_sq.dtype) == ((FIRST, SECOND) if scales else (wide, wide))
