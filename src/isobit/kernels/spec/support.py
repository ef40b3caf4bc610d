"""What the specification says of itself: it computes everything, on every machine."""

import torch

from isobit.kernels.backend import ModelNeeds
from isobit.kernels.spec import sizes as sizes  # noqa: PLC0414 (said to be part of this module)

has_own_memory = False
libraries: tuple[str, ...] = ()
extra = None
remedy = "reinstall torch"


def device_model(device: torch.device) -> str | None:
    """See ``Support``."""
    return None


def is_present() -> bool:
    """Every machine has a CPU."""
    return True


def state() -> tuple[str, bool]:
    """See ``Support``."""
    return "the CPU", False


def problem() -> str | None:
    """See ``Support``."""
    return None


def model_problem(needs: ModelNeeds) -> str | None:
    """See ``Support``."""
    return None
