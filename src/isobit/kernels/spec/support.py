"""What the specification reports about itself: it computes everything, on every machine."""

import torch

from isobit.kernels.backend import ModelNeeds
from isobit.kernels.spec import sizes as sizes  # noqa: PLC0414 (part of ``Support``)

has_own_memory = False
libraries: tuple[str, ...] = ()
extra = None
remedy = "reinstall torch"


def device_model(device: torch.device) -> str | None:
    return None


def is_present() -> bool:
    return True


def state() -> tuple[str, bool]:
    return "the CPU", False


def problem() -> str | None:
    return None


def model_problem(needs: ModelNeeds) -> str | None:
    return None
