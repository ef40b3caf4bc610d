"""The device that a command computes on, chosen once and said where it is not the one that the machine suggests."""

import sys

import torch

from isobit.config.schema import Device, PrecisionConfig
from isobit.errors import ConfigError
from isobit.kernels.device import hopper_has_heads, hopper_problem
from isobit.models.config import ModelConfig


def choose_device(wanted: Device, config: ModelConfig, precision: PrecisionConfig) -> torch.device:
    """``auto`` is a Hopper GPU where there is one that computes this model in this flow, else the CPU; a GPU left unused gets a line.

    Raises ConfigError for ``cuda`` where no GPU can be used, or not for this.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    problem = hopper_problem() or _model_problem(config, precision)
    if problem is None:
        return torch.device("cuda")
    if wanted == "cuda":
        raise ConfigError(f"device = 'cuda', but {problem}; use device 'cpu'")
    if torch.cuda.is_available():
        print(f"isobit: computing on the CPU, because {problem}", file=sys.stderr)
    return torch.device("cpu")


def _model_problem(config: ModelConfig, precision: PrecisionConfig) -> str | None:
    """Why the GPU's kernels do not compute a model, or None if they do."""
    if precision.preset == "fp32":
        return "precision 'fp32' is the CPU's reference"
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    if not hopper_has_heads(*heads):
        return (
            f"the model has {heads[0]} query heads of {heads[2]} over {heads[1]} KV heads, and attention on the GPU takes head sizes 64 "
            "and 128 and 1 to 16 query heads a KV head"
        )
    return None


def training_device(wanted: Device) -> torch.device:
    """The device of a run that trains: the CPU, because the GPU kernels have no backward yet.  Raises ConfigError for ``cuda``."""
    if wanted == "cuda":
        raise ConfigError("device = 'cuda': training on a GPU is not built yet (rollout, eval and verify are); use device 'cpu'")
    if wanted == "auto" and hopper_problem() is None:
        print("isobit: training on the CPU: the GPU kernels have no backward yet", file=sys.stderr)
    return torch.device("cpu")
