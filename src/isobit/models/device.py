"""The device that a command computes on, chosen once and said where it is not the one that the
machine suggests.
"""

import sys

import torch

from isobit.config.schema import Device, PrecisionConfig
from isobit.errors import ConfigError
from isobit.kernels.device import hopper_problem
from isobit.models.config import ModelConfig


def choose_device(wanted: Device, config: ModelConfig, precision: PrecisionConfig) -> torch.device:
    """``auto`` is a Hopper GPU where there is one that computes this model in this flow, else the
    CPU; a GPU left unused gets a line.

    Raises ConfigError for ``cuda`` where no GPU can be used, or not for this.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    problem = hopper_problem() or config.hopper_problem(precision.preset)
    if problem is None:
        return torch.device("cuda")
    if wanted == "cuda":
        raise ConfigError(f"device = 'cuda', but {problem}; use device 'cpu'")
    if torch.cuda.is_available():
        print(f"isobit: computing on the CPU, because {problem}", file=sys.stderr)
    return torch.device("cpu")
