"""Layouts without a GPU: the KV cache, its size and reading it back; rows gathered from ranks."""

from math import prod

import pytest
import torch

from isobit.kernels.operands import DeltaShape
from isobit.kernels.triton import sizes
from isobit.kernels.triton.attend import Attended, GpuKvCache
from isobit.kernels.triton.attention import SCALES, PackedKeys
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.kernels.triton.linear import joined_rows
from isobit.kernels.triton.qkv import Queries
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import DTYPES, E4M3, EIGHT_BITS
from isobit.util.errors import ConfigError
from tests.kernels.caches import CacheShape, bytes_of_pages
from tests.kernels.comparison import same

SHAPE = CacheShape(4, 2, 64)


@pytest.mark.parametrize(
    "mixed",
    [
        SHAPE.flow("fp8"),
        SHAPE.flow("int8"),
        SHAPE.flow("bf16"),
        SHAPE.flow("fp8", first_layers_bf16=1, last_layers_bf16=1),
        SHAPE.flow("int8", first_layers_bf16=1, last_layers_bf16=1),
    ],
)
def test_pages_are_zero_and_of_the_promised_size(mixed: PrecisionFlow) -> None:
    cache = GpuKvCache(SHAPE, mixed, 5, "cpu")
    assert sum(x.nbytes for x in bytes_of_pages(cache)) == 5 * sizes.page_bytes(SHAPE, mixed)
    assert all(x.is_contiguous() and not x.any() for x in bytes_of_pages(cache))
    for pages, format in zip(cache.layers.values(), cache.formats.values(), strict=True):
        assert pages.keys.shape == (5, 2, PAGE_TOKENS, 64)
        if format in EIGHT_BITS:
            assert pages.values.shape == (5, 2, 64, PAGE_TOKENS)
            assert pages.keys.dtype == pages.values.dtype == DTYPES[format]
            assert pages.key_scales is not None and pages.key_scales.shape == (5, 2, PAGE_TOKENS)
            assert pages.key_scales.dtype == SCALES[DTYPES[format]]
        else:
            assert (
                pages.values.shape == pages.keys.shape
                and pages.values.dtype == torch.bfloat16
                and pages.key_scales is None
            )


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_layers_are_apart_and_cleared_in_place(preset: str) -> None:
    cache = GpuKvCache(SHAPE, SHAPE.flow(preset, first_layers_bf16=1, last_layers_bf16=1), 3, "cpu")
    views = bytes_of_pages(cache)
    for i, x in enumerate(views):
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(views))
    cache.clear()
    assert not any(x.any() for x in views)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_read_gives_a_token_back(preset: str) -> None:
    cache = GpuKvCache(SHAPE, SHAPE.flow(preset, first_layers_bf16=1), 3, "cpu")
    for x in bytes_of_pages(cache):
        x.copy_(torch.randint(0, 120, x.shape))
    slots = torch.tensor([2 * PAGE_TOKENS + 7, 0, PAGE_TOKENS + 127])
    for layer, pages in cache.layers.items():
        k, v = cache.read(layer, slots)
        assert k.values.shape == v.values.shape == (
            3,
            2,
            64,
        ) and k.scales.shape == v.scales.shape == (3, 2)
        for row, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, PAGE_TOKENS)
            assert same(k.values[row], pages.keys[page, :, offset])
            if pages.key_scales is None or pages.value_scales is None:
                assert same(v.values[row], pages.values[page, :, offset])
                assert (k.scales[row] == 127).all() and (v.scales[row] == 127).all()
            else:
                assert same(v.values[row], pages.values[page, :, :, offset])
                assert same(k.scales[row], pages.key_scales[page, :, offset])
                assert same(v.scales[row], pages.value_scales[page, :, offset])


def test_the_fp32_flow_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPU"):
        GpuKvCache(SHAPE, SHAPE.flow("fp32"), 1, "cpu")


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 64])
def test_scales_lie_as_a_quantiser_leaves_them(tokens: int):
    values = torch.zeros(tokens, 300).to(E4M3)
    scales = torch.arange(3.0 * tokens).view(3, tokens)
    made, expected = joined_rows(values, scales), QuantRows.empty(tokens, 300, values.device)
    assert torch.equal(made.scales, scales.t())
    assert made.scales.stride() == expected.scales.stride()
    assert made.values.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_what_the_backward_reads_of_some_tokens(dtype: torch.dtype) -> None:
    """A row stands where it is asked for, also twice, in contiguous tensors of the same formats."""
    scale = SCALES.get(dtype)

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.arange(7 * prod(shape)).remainder(50).view(7, *shape).to(dtype)

    def scales(dtype: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if dtype is None else made(*shape, dtype=dtype)

    wide = torch.bfloat16 if scale is None else torch.float16
    queries = Queries(made(4, 8), scales(scale and torch.float32, 4))
    keys = PackedKeys(made(2, 8), scales(scale, 2), made(2, 8, dtype=wide), scales(scale, 2))
    output, sums = made(4, 8, dtype=torch.bfloat16), made(4, dtype=torch.float32)
    index = torch.tensor([0, 1, 2, 0, 1, 6])
    whole = Attended(queries, keys, output, sums, 5, None)
    some = whole.rows(index)
    assert some.window == 5
    pairs = list(zip(tensors_of(whole), tensors_of(some), strict=True))
    assert len(pairs) == (5 if scale is None else 8)
    for one, other in pairs:
        assert other.is_contiguous() and other.dtype == one.dtype
        assert torch.equal(other.float(), one.float()[index])


def tensors_of(attended: Attended) -> list[torch.Tensor]:
    queries, keys = attended.queries, attended.keys
    found = [queries.values, queries.scales, keys.keys, keys.key_scales, keys.values]
    found += [keys.value_scales, attended.output, attended.log_sum_exp]
    return [one for one in found if one is not None]


def test_carries_are_of_delta_layers_and_copied_in_each() -> None:
    shape = CacheShape(3, 1, 64, DeltaShape(2, 4, 16, 32, 4), (0, 2))
    flow = shape.flow("bf16")
    cache = GpuKvCache(shape, flow, 2, "cpu", 5)
    tensors = [one for carries in cache.delta.values() for one in carries.tensors]
    assert list(cache.layers) == [1] and list(cache.delta) == [0, 2]
    assert sum(one.nbytes for one in tensors) == 5 * sizes.carry_bytes(shape, flow)
    assert not any(one.any() for one in tensors)
    for one in tensors:
        one.normal_()
    expected = [one.clone() for one in tensors]
    for one in expected:
        one[0], one[4] = one[3], one[1]
    cache.copy_carries([3, 1], [0, 4])
    assert all(map(torch.equal, tensors, expected))
    cache.clear()
    assert not any(one.any() for one in tensors)
