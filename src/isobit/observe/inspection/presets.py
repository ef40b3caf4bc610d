"""What each preset makes of a model: its share in E4M3, the formats of the cache, and what its
published weights take.
"""

from dataclasses import dataclass
from math import prod
from typing import get_args

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.sizes import Sizes
from isobit.memory.published import published_bytes
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape, parameter_count
from isobit.precision.flow import Graph, PrecisionFlow, build_flow


@dataclass(frozen=True, slots=True)
class PresetFigures:
    """One preset without options."""

    preset: str
    rollout_e4m3: float
    """Share of the parameters that the rollout reads in E4M3."""
    training_e4m3: float
    """The same of the training forward."""
    cache: str
    """The format of the KV cache in most layers."""
    published_bytes: int
    """What both sides read, in the memory of the back end."""
    exact: bool
    """Whether both sides are one function."""


def preset_figures(config: ModelConfig, sizes: Sizes) -> list[PresetFigures]:
    """Of every preset, on a back end of those sizes."""
    shape = decoder_shape(config)
    flows = [build_flow(PrecisionConfig(preset=preset), shape) for preset in get_args(Preset)]
    return [_figures(config, flow, sizes) for flow in flows]


def _figures(config: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> PresetFigures:
    return PresetFigures(
        flow.preset,
        _share_in_e4m3(config, flow.rollout),
        _share_in_e4m3(config, flow.training),
        flow.rollout.attention_format(config.num_layers // 2),
        published_bytes(config, flow, sizes),
        flow.exact,
    )


def _share_in_e4m3(config: ModelConfig, graph: Graph) -> float:
    quantised = sum(
        prod(master.shape)
        for name, master in build_decoder(config).masters().items()
        if master.kind == "matrix" and graph.site(name.rpartition(".")[0]).forward == "e4m3"
    )
    return quantised / parameter_count(config)
