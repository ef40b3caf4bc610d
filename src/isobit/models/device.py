"""The device that a command computes on, chosen once and said where it is not the one that the
machine suggests.
"""

import torch

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig
from isobit.kernels import backend
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.terminal import say


def choose_device(wanted: Device, config: ModelConfig, precision: PrecisionConfig) -> torch.device:
    """``auto`` is the first device of the machine that computes this model in this flow; one that
    is left unused gets a line.

    Raises ConfigError for a device asked for by name that cannot be used, or not for this.
    """
    choice = backend.choose_device(wanted, model_needs(config, precision.preset))
    for problem in choice.passed_over:
        say(f"isobit: computing on {choice.device}, because {problem}")
    return choice.device


def model_needs(config: ModelConfig, preset: str) -> backend.ModelNeeds:
    """What a model in a flow asks of a back end."""
    shapes = (site.linear for site in decoder_shape(config).sites)
    linears = {(linear.rows, linear.in_features): linear for linear in shapes if linear is not None}
    return backend.ModelNeeds(
        config.num_heads, config.num_kv_heads, config.head_dim, preset, tuple(linears.values())
    )
