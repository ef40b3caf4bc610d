"""Pages of K and V: what goes in comes out, a page is copied whole, and its size is the promised
one.
"""

from dataclasses import replace

import pytest
import torch

from isobit.kernels.operands import DeltaShape
from isobit.kernels.spec import sizes
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, SpecKvCache
from isobit.kernels.spec.qkv import Heads
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import DTYPES
from tests.kernels.caches import CacheShape
from tests.kernels.comparison import same

SHAPE = CacheShape(3, 2, 32)
FLOWS = [
    SHAPE.flow("fp8"),
    SHAPE.flow("int8"),
    SHAPE.flow("bf16"),
    SHAPE.flow("fp32"),
    SHAPE.flow("fp8", first_layers_bf16=1),
    SHAPE.flow("int8", first_layers_bf16=1),
]
IDS = ["fp8", "int8", "bf16", "fp32", "mixed", "mixed int8"]


def raw(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    return heads.values.view(torch.uint8), heads.scales


def tokens(dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 2, 32).to(dtype), torch.randn(count, 2, 32).to(dtype)


@pytest.mark.parametrize("mixed", FLOWS, ids=IDS)
def test_pages_are_zero_and_of_the_promised_size(mixed: PrecisionFlow) -> None:
    cache = SpecKvCache(SHAPE, mixed, 5)
    assert (cache.page_tokens, cache.num_pages) == (sizes.page_tokens, 5)
    held = [x for arena in cache.layers.values() for x in (arena.values, arena.scales)]
    assert sum(x.nbytes for x in held) == 5 * sizes.page_bytes(SHAPE, mixed)
    assert not any(x.view(torch.uint8).any() for x in held)


@pytest.mark.parametrize("mixed", FLOWS, ids=IDS)
def test_a_token_is_read_as_it_was_encoded_and_others_stay(mixed: PrecisionFlow) -> None:
    cache = SpecKvCache(SHAPE, mixed, 3)
    dtype = DTYPES[mixed.training.activations]
    slots = torch.tensor([2 * PAGE_TOKENS + 7, 0, PAGE_TOKENS + 63, 1])
    for layer, format in cache.formats.items():
        pair = tokens(dtype, 4)
        cache.write(layer, slots, *pair)
        for found, source in zip(cache.read(layer, slots), pair, strict=True):
            assert same(found, Heads.encode(source, format))
        other = cache.read(layer, torch.tensor([2, PAGE_TOKENS]))
        assert not any(x.any() for heads in other for x in raw(heads))
        first = cache.gather(layer, torch.tensor([2, 0]), 8)
        k, v = cache.read(layer, torch.tensor([2 * PAGE_TOKENS + 7, 1]))
        for side, heads in enumerate((k, v)):
            for page, token in ((0, 7), (1, 1)):
                assert torch.equal(raw(first)[0][side, page, :, token], raw(heads)[0][page])


@pytest.mark.parametrize("flow", ["fp32", "int8"])
def test_carries_of_delta_rules_are_of_the_promised_size_and_copied_in_all_layers(
    flow: str,
) -> None:
    rule = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=4, width=4)
    shape = replace(SHAPE, delta=rule, delta_layers=(0, 2))
    mixed = shape.flow(flow)
    cache = SpecKvCache(shape, mixed, 5, 4)
    assert sorted(cache.layers) == [1] and sorted(cache.delta) == [0, 2]
    held = [x for arena in cache.layers.values() for x in (arena.values, arena.scales)]
    assert sum(x.nbytes for x in held) == 5 * sizes.page_bytes(shape, mixed)
    carried = [x for carries in cache.delta.values() for x in carries.tensors]
    assert sum(x.nbytes for x in carried) == 4 * sizes.carry_bytes(shape, mixed)
    assert sizes.carry_bytes(SHAPE, mixed) == 0
    for x in carried:
        x.copy_(torch.randn(x.shape))
    before = [x.clone() for x in carried]
    cache.copy_carries([0, 1], [3, 2])
    cache.copy_pages([0, 1], [3, 2])
    cache.clear_pages([1, 3])
    for x, old in zip(carried, before, strict=True):
        assert torch.equal(x[[3, 2, 0, 1]], old[[0, 1, 0, 1]])
    cache.clear()
    assert not any(x.any() for x in carried)


def test_pages_are_copied_in_all_layers_and_cleared_in_place() -> None:
    cache = SpecKvCache(SHAPE, SHAPE.flow("fp8", first_layers_bf16=1), 4)
    for layer in range(3):
        cache.write(layer, torch.arange(2 * PAGE_TOKENS), *tokens(torch.bfloat16, 2 * PAGE_TOKENS))
    cache.copy_pages([0, 1], [3, 2])
    for layer in range(3):
        pages = cache.layers[layer]
        for x in raw(pages):
            assert torch.equal(x[:, 3], x[:, 0]) and torch.equal(x[:, 2], x[:, 1])
            assert not torch.equal(x[:, 0], x[:, 1])
    places = [x.data_ptr() for arena in cache.layers.values() for x in raw(arena)]
    cache.layers[0].values.fill_(torch.nan)
    cache.clear()
    assert places == [x.data_ptr() for arena in cache.layers.values() for x in raw(arena)]
    assert not any(x.any() for arena in cache.layers.values() for x in raw(arena))
