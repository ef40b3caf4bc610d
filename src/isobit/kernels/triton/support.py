"""Support of NVIDIA GPUs since Ampere (sm_80) for a device and a model; loads on every machine."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from isobit.kernels.backend import ModelNeeds
from isobit.kernels.triton import sizes as sizes  # noqa: PLC0414 (said to be part of this module)
from isobit.kernels.triton.heads import heads_problem
from isobit.util.plain_files import read_plain

has_own_memory = True
libraries = ("triton",)
extra = None
remedy = (
    "install the build of torch that fits the driver, which brings Triton: "
    "https://pytorch.org/get-started"
)

DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST = 8, 0


def device_model(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device)


def figures(device: torch.device) -> Mapping[str, str | int]:
    """The name, generation and sizes of a card, and the versions of its driver and of CUDA."""
    found = torch.cuda.get_device_properties(device)
    driver = re.search(rb"\s(\d+\.[\d.]+)\s", read_plain(DRIVER)) if DRIVER.is_file() else None
    return {
        "name": found.name,
        "generation": f"sm_{found.major}{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "shared_memory_bytes": found.shared_memory_per_block_optin,
        "cuda": str(torch.version.cuda),
        "driver": driver[1].decode() if driver is not None else "unknown",
    }


def device_class(device: torch.device) -> str:
    return class_of("triton", device)


def class_of(back_end: str, device: torch.device) -> str:
    """The generation of a card, and the back end."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}-{back_end}"


def is_present() -> bool:
    return torch.cuda.is_available()


def is_preferred() -> bool:
    return True


def state() -> tuple[str, bool]:
    return state_of("triton", problem())


def state_of(back_end: str, why_not: str | None) -> tuple[str, bool]:
    """``state`` of a back end with that problem, or None."""
    if not torch.cuda.is_available():
        if not DRIVER.is_file():
            return "none; everything runs on the CPU", False
        return (
            f"the machine has an NVIDIA driver, but torch {torch.__version__} cannot use it; "
            "everything runs on the CPU",
            True,
        )
    if why_not is not None:
        return f"not used: {why_not}; everything runs on the CPU", False
    free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info())
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()}: sm_{major}{minor}, back end {back_end}, {free:.3g} GiB "
        f"free of {total:.3g} GiB; rollout, training, evaluation and verify run on it",
        False,
    )


def problem() -> str | None:
    """Why no GPU of this machine can be used, or None."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability() < _OLDEST:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return f"{name} is sm_{major}{minor}, and the GPU kernels need a card since Ampere (sm_80)"
    return triton_problem()


def triton_problem() -> str | None:
    """What is missing where Triton is."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return (
        "Triton is not installed, which the GPU kernels are written in; it comes with torch for "
        "CUDA: https://pytorch.org/get-started"
    )


def model_problem(needs: ModelNeeds) -> str | None:
    if needs.preset == "fp32":
        return "precision 'fp32' is the CPU's reference"
    return heads_problem(needs.num_heads, needs.num_kv_heads, needs.head_dim)
