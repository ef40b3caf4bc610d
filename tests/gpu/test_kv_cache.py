"""Copying pages on a Hopper GPU: every layer of every format, and no other page."""

from dataclasses import dataclass

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.hopper.attend import HopperKvCache
from isobit.precision.flow import LinearShape, build_flow
from tests.sites import shape_of_layers

LAYERS = shape_of_layers(5, {"qkv_proj": LinearShape({"q_proj": 128}, 128)})


@dataclass(frozen=True)
class Shape:
    num_layers: int = 5
    num_kv_heads: int = 3
    head_dim: int = 64


def tensors(cache: HopperKvCache) -> list[torch.Tensor]:
    """Bytes of every tensor of every layer."""
    every = (
        x
        for pages in cache.layers
        for x in (pages.keys, pages.key_scales, pages.values, pages.value_scales)
    )
    return [x.view(torch.uint8) for x in every if x is not None]


@pytest.mark.parametrize("options", [{}, {"first_layers_bf16": 1, "last_layers_bf16": 2}])
@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize("pairs", [[], [(3, 0)], [(3, 0), (3, 7), (5, 6), (1, 8)]])
def test_pages_are_copied_in_every_layer(
    pairs: list[tuple[int, int]], preset: str, options: dict[str, int]
) -> None:
    flow = build_flow(PrecisionConfig.model_validate({"preset": preset, **options}), LAYERS)
    cache = HopperKvCache(Shape(), flow, 9, torch.zeros(1).cuda().device)
    for x in tensors(cache):
        x.copy_(torch.randint(0, 256, x.shape))
    expected = [x.clone() for x in tensors(cache)]
    for x in expected:
        for source, target in pairs:
            x[target] = x[source]
    cache.copy_pages([source for source, _ in pairs], [target for _, target in pairs])
    assert all(torch.equal(x, y) for x, y in zip(tensors(cache), expected, strict=True))
