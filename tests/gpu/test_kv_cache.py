"""Copying pages on a Hopper GPU: every layer of every format, and no other page."""

import pytest
import torch

from isobit.kernels.triton.attend import GpuKvCache
from tests.kernels.caches import CacheShape, bytes_of_pages

SHAPE = CacheShape(5, 3, 64)


@pytest.mark.parametrize("options", [{}, {"first_layers_bf16": 1, "last_layers_bf16": 2}])
@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize("pairs", [[], [(3, 0)], [(3, 0), (3, 7), (5, 6), (1, 8)]])
def test_pages_are_copied_in_every_layer(
    pairs: list[tuple[int, int]], preset: str, options: dict[str, int]
) -> None:
    flow = SHAPE.flow(preset, **options)
    cache = GpuKvCache(SHAPE, flow, 9, torch.zeros(1).cuda().device)
    for x in bytes_of_pages(cache):
        x.copy_(torch.randint(0, 256, x.shape))
    expected = [x.clone() for x in bytes_of_pages(cache)]
    for x in expected:
        for source, target in pairs:
            x[target] = x[source]
    cache.copy_pages([source for source, _ in pairs], [target for _, target in pairs])
    assert all(torch.equal(x, y) for x, y in zip(bytes_of_pages(cache), expected, strict=True))
