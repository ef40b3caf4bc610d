"""Copying pages and carries on a GPU: every layer of every format, and no other page or carry."""

import pytest
import torch

from isobit.kernels.operands import DeltaShape
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


@pytest.mark.parametrize("pairs", [[], [(3, 0)], [(3, 0), (3, 4), (5, 6)]])
def test_carries_are_copied_in_every_layer(pairs: list[tuple[int, int]]) -> None:
    shape = CacheShape(3, 1, 64, DeltaShape(2, 4, 16, 32, 4), (0, 2))
    cache = GpuKvCache(shape, shape.flow("bf16"), 2, torch.zeros(1).cuda().device, 7)
    tensors = [one for carries in cache.delta.values() for one in carries.tensors]
    assert len(tensors) == 10 and all(len(one) == 7 and not one.any() for one in tensors)
    for one in tensors:
        one.normal_()
    expected = [one.clone() for one in tensors]
    for one in expected:
        for source, target in pairs:
            one[target] = one[source]
    cache.copy_carries([source for source, _ in pairs], [target for _, target in pairs])
    assert all(map(torch.equal, tensors, expected))
    cache.clear()
    assert not any(one.any() for one in tensors)
