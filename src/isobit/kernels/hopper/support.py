"""Support of the Hopper back end (sm_90) for a device and a model; loads on every machine."""

import importlib.util
from pathlib import Path

import torch

from isobit.kernels.backend import ModelNeeds
from isobit.kernels.hopper import sizes as sizes  # noqa: PLC0414 (said to be part of this module)
from isobit.kernels.triton.heads import heads_problem
from isobit.precision.flow import LinearShape

has_own_memory = True
libraries = ("triton", "sgl-deep-gemm")
extra = "hopper"
remedy = (
    "pip install 'isobit[hopper]', and install CUDA's compiler nvcc; "
    "https://pytorch.org/get-started has the build of torch that fits the driver"
)

_HOPPER = 9
HEAD_SIZES = (64, 128)
K_MULTIPLE, N_MULTIPLE = 16, 8
"""Divisors of an FP8 linear's sizes: the copy engine reads rows of whole 16 bytes."""


def device_model(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device)


def is_present() -> bool:
    return torch.cuda.is_available()


def state() -> tuple[str, bool]:
    if not torch.cuda.is_available():
        if not Path("/proc/driver/nvidia/version").is_file():
            return "none; everything runs on the CPU", False
        return (
            f"the machine has an NVIDIA driver, but torch {torch.__version__} cannot use it; "
            "everything runs on the CPU",
            True,
        )
    if (why_not := problem()) is not None:
        return f"not used: {why_not}; everything runs on the CPU", False
    free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info())
    return (
        f"{torch.cuda.get_device_name()}: Hopper, {free:.3g} GiB free of {total:.3g} GiB; rollout, "
        "training, evaluation and verify run on it",
        False,
    )


def problem() -> str | None:
    """Why no GPU of this machine can be used, or None."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        name = torch.cuda.get_device_name()
        return (
            f"{name} is sm_{major}{minor}, and the GPU kernels are written and proven for Hopper "
            "(sm_90) only"
        )
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed, which the GPU kernels are written in; it comes with torch "
            "for CUDA: pip install 'isobit[hopper]'"
        )
    return None


def model_problem(needs: ModelNeeds) -> str | None:
    if needs.preset == "fp32":
        return "precision 'fp32' is the CPU's reference"
    if needs.gate != "silu":
        what = "a clamped SwiGLU, sinks, and biases of all linears"
        what = "an MLP with GELU (GeGLU)" if needs.gate == "gelu_tanh" else what
        return f"the model has {what}, and the kernels on the GPU compute SiLU (SwiGLU) alone"
    if needs.has_frozen_experts:
        return "LoRA on a model with experts is computed on CPUs alone"
    if needs.preset != "bf16":
        for linear in needs.linears:
            if (why_not := linear_problem(linear)) is not None:
                return why_not
    return heads_problem(needs.num_heads, needs.num_kv_heads, needs.head_dim, HEAD_SIZES)


def linear_problem(linear: LinearShape) -> str | None:
    """Why the FP8 products do not take a linear of that shape, or None."""
    for part, rows in linear.parts.items():
        if rows % N_MULTIPLE or linear.in_features % K_MULTIPLE:
            return (
                f"{part} is [{rows}, {linear.in_features}], and FP8 on the GPU takes outputs in "
                f"multiples of {N_MULTIPLE} and inputs in multiples of {K_MULTIPLE}"
            )
    return None
