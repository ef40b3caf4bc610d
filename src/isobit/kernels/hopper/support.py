"""Support of the Hopper back end (sm_90) for a device and a model; loads on every machine."""

import torch

from isobit.kernels.backend import ModelNeeds
from isobit.kernels.hopper import sizes as sizes  # noqa: PLC0414 (said to be part of this module)
from isobit.kernels.triton import support as portable
from isobit.kernels.triton.support import (
    class_of,
    device_model,
    figures,
    has_own_memory,
    is_present,
    state_of,
    triton_problem,
)
from isobit.precision.flow import LinearShape

__all__ = ["device_model", "figures", "has_own_memory", "is_present", "sizes"]

libraries = ("triton", "sgl-deep-gemm")
extra = "hopper"
remedy = (
    "pip install 'isobit[hopper]', and install CUDA's compiler nvcc; "
    "https://pytorch.org/get-started has the build of torch that fits the driver"
)

_HOPPER = 9
K_MULTIPLE, N_MULTIPLE = 16, 8
"""Divisors of an FP8 linear's sizes: the copy engine reads rows of whole 16 bytes."""


def device_class(device: torch.device) -> str:
    return class_of("hopper", device)


def is_preferred() -> bool:
    """True on cards of its generation, and for plans where there is no card."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == _HOPPER


def state() -> tuple[str, bool]:
    return state_of("hopper", problem())


def problem() -> str | None:
    """Why no GPU of this machine can be used, or None."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        return (
            f"{torch.cuda.get_device_name()} is sm_{major}{minor}, and the kernels of the back end "
            "'hopper' are for Hopper (sm_90) only; back_end = 'triton' is for all cards since "
            "Ampere"
        )
    return triton_problem()


def model_problem(needs: ModelNeeds) -> str | None:
    problem = portable.model_problem(needs)
    if problem is not None or needs.preset == "bf16":
        return problem
    problems = (linear_problem(linear) for linear in needs.linears)
    problem = next((one for one in problems if one is not None), None)
    return problem and f"{problem}; back_end = 'triton' computes it"


def linear_problem(linear: LinearShape) -> str | None:
    """Why the FP8 products do not take a linear of that shape, or None."""
    for part, rows in linear.parts.items():
        if rows % N_MULTIPLE or linear.in_features % K_MULTIPLE:
            return (
                f"{part} is [{rows}, {linear.in_features}], and FP8 on the GPU takes outputs in "
                f"multiples of {N_MULTIPLE} and inputs in multiples of {K_MULTIPLE}"
            )
    return None
