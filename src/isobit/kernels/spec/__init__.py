"""The CPU specification: every operation in torch, exact where exactness is promised.  The other
back ends are tested against it.

The package itself is its ``Support`` (``isobit.kernels.backend``): it computes everything, on every
machine.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from isobit.kernels.spec import sizes as sizes

if TYPE_CHECKING:
    from isobit.kernels.backend import ModelNeeds

has_own_memory = False
libraries: tuple[str, ...] = ()
extra = None
remedy = "reinstall torch"


def device_model(device: torch.device) -> str | None:
    return None


def figures(device: torch.device) -> Mapping[str, str | int]:
    return {}


def device_class(device: torch.device) -> str:
    return device.type


def is_preferred() -> bool:
    return True


def is_present() -> bool:
    return True


def state() -> tuple[str, bool]:
    return "the CPU", False


def problem() -> str | None:
    return None


def model_problem(needs: "ModelNeeds") -> str | None:
    return None
