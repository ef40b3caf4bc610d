"""Models of a few layers whose caches of K and V tests lay out, and the tensors of such a cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.config.precision import PrecisionConfig
from isobit.kernels.operands import DeltaShape
from isobit.precision.flow import LinearShape, PrecisionFlow, build_flow
from tests.sites import shape_of_layers


@dataclass(frozen=True)
class CacheShape:
    """What a cache needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    delta: DeltaShape | None = None
    delta_layers: tuple[int, ...] = ()

    def flow(self, preset: str, **options: int) -> PrecisionFlow:
        """The flow of a preset and others of its options."""
        layers = shape_of_layers(self.num_layers, {"qkv_proj": LinearShape({"q_proj": 128}, 128)})
        return build_flow(PrecisionConfig.model_validate({"preset": preset, **options}), layers)


def bytes_of_pages(cache: Any) -> list[Tensor]:
    """Every tensor of every layer of a cache of the GPU's back end, as uint8."""
    every = (
        x
        for pages in cache.layers.values()
        for x in (pages.keys, pages.key_scales, pages.values, pages.value_scales)
    )
    return [x.view(torch.uint8) for x in every if x is not None]
