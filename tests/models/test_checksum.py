"""The checksum of a tensor's bytes: what it is by its formula in whole numbers, that any changed
byte changes it, and that rows of several ranks add up.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.noise import splitmix64_of
from isobit.models import checksum as module
from isobit.models.checksum import added_up, checksum, checksum_of
from isobit.models.policy import Policy, random_policy
from isobit.models.tensor_slices import Slice
from isobit.precision.quant_tensor import QuantTensor
from tests.conftest import TINY

CHUNK = 8


@pytest.fixture(params=[0, 5, CHUNK])
def short_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a few words, so that small tensors have several; sums made one by one as on a CPU, or many
    at once as on a GPU.
    """
    monkeypatch.setattr(module, "_CHUNK", CHUNK)
    monkeypatch.setattr(module, "_words_at_once", lambda device: request.param)
    module._inner.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    module._inner.cache_clear()  # pyright: ignore[reportPrivateUsage]


def by_formula(name: str, data: bytes, chunk: int) -> int:
    """The same in Python's whole numbers."""
    data += bytes(-len(data) % 4)
    seed = int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )
    total = 0
    for place in range(0, len(data), 4):
        number, inside = divmod(place // 4, chunk)
        word = int.from_bytes(data[place : place + 4], "little", signed=True)
        total += (splitmix64_of(seed, number) | 1) * (splitmix64_of(5, inside) | 1) * word
    return total % (1 << 64)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 31, 32, 33, 64, 65, 200])
def test_it_is_what_the_formula_says(size: int, short_chunks: None) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert checksum_of({"x": data}) == by_formula("x", bytes(data.tolist()), CHUNK)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]
)
def test_any_flipped_bit_of_any_byte_changes_it(dtype: torch.dtype, short_chunks: None) -> None:
    tensor = torch.randint(0, 256, (13 * 5 * 8,), dtype=torch.uint8).view(dtype)
    whole, data = checksum_of({"x": tensor}), tensor.view(torch.uint8)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum_of({"x": tensor}) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert checksum_of({"x": tensor}) == whole


def test_a_flipped_bit_of_a_tensor_of_several_chunks_changes_it() -> None:
    """With chunks as they are: a byte in each, and the first and the last."""
    tensor = torch.randn(2_500_000)
    whole, data = checksum_of({"x": tensor}), tensor.view(torch.uint8)
    for place in (0, 3, 4_194_303, 4_194_304, 8_388_607, 8_388_608, len(data) - 1):
        data[place] ^= 0x80
        assert checksum_of({"x": tensor}) != whole, place
        data[place] ^= 0x80


@pytest.mark.parametrize("count", [1, 2, 7])
def test_many_tensors_are_what_the_formula_says(count: int, short_chunks: None) -> None:
    sizes = [(29 * place) % 45 for place in range(count)]
    data = {f"t{p}": torch.randint(0, 256, (size,)).byte() for p, size in enumerate(sizes)}
    expected = sum(by_formula(name, bytes(one.tolist()), CHUNK) for name, one in data.items())
    assert checksum_of(data) == expected % (1 << 64)


def test_what_has_changed_places_changes_it(short_chunks: None) -> None:
    tensor = torch.randn(64, 4)
    whole = checksum_of({"x": tensor})
    for other in (tensor.flip(0), tensor.roll(CHUNK // 4, 0), tensor[torch.randperm(64)]):
        assert checksum_of({"x": other}) != whole
    # numbers that differ in their signs alone: words that differ by 2^31
    signs = tensor.clone()
    signs[5, 0] = -signs[3, 0]
    swapped = signs.clone()
    swapped[[3, 5], 0] = signs[[5, 3], 0]
    assert checksum_of({"x": swapped}) != checksum_of({"x": signs})
    assert checksum_of({"x": tensor, "y": signs}) != checksum_of({"x": signs, "y": tensor})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("cuts", [(0, 64), (0, 4, 64), (0, 0, 20, 24, 64, 64), (0, 60, 62, 64)])
def test_rows_add_up_to_the_whole(
    cuts: tuple[int, ...], dtype: torch.dtype, short_chunks: None
) -> None:
    tensor = torch.randint(0, 256, (64, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    whole = checksum_of({"x": tensor})
    parts = [
        checksum([("x", Slice((64, 4), first, tensor[first:last]))])
        for first, last in pairwise(cuts)
    ]
    assert added_up(parts) == whole


def test_numbers_mapped_behind_others_need_not_be_aligned() -> None:
    data = torch.randint(0, 256, (42,), dtype=torch.uint8)
    assert checksum_of({"x": data[2:]}) == checksum_of({"x": data[2:].clone()})
    assert checksum_of({"x": data[2:].view(torch.bfloat16)}) == checksum_of({"x": data[2:]})


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-rollout"])
def test_every_published_byte_of_a_policy_counts(preset: str) -> None:
    policy = random_policy(TINY, preset, seed=0)
    whole = policy.checksum()
    tensors = published(policy)
    assert len(tensors) >= len(policy.shapes)
    for tensor in tensors:
        data = tensor.view(-1).view(torch.uint8)
        for place in (0, len(data) // 2, len(data) - 1):
            data[place] ^= 1
            assert policy.checksum() != whole
            data[place] ^= 1
    assert policy.checksum() == whole
    other = Policy(TINY, PrecisionConfig.model_validate(preset), policy.masters)
    assert other.checksum() == whole, "of equal weights in other memory"


def published(policy: Policy) -> list[torch.Tensor]:
    """What both sides read, each tensor once."""
    found = dict[int, torch.Tensor]()
    for side in ("rollout", "training"):
        weights = policy.weights(side)
        for linear in weights.linears.values():
            matrix = linear.matrix
            both = [matrix.values, matrix.scales] if isinstance(matrix, QuantTensor) else [matrix]
            for tensor in both:
                assert isinstance(tensor, torch.Tensor)
                found[id(tensor)] = tensor
        found |= {
            id(weights.plain[name]): weights.plain[name]
            for name in policy.shapes
            if name in weights.plain
        }
    return list(found.values())
