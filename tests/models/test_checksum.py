"""The checksum of tensors by name: what names add to it, that what has changed places changes it,
and that rows of several ranks add up.
"""

import hashlib
from itertools import pairwise

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.noise import Rows
from isobit.kernels.spec import optimiser as specification
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import Slice, added_up, checksum, checksum_of
from isobit.precision.quant_tensor import QuantisedWeight
from tests.tiny import TINY

CHUNK = 8


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few words, so that small tensors have several."""
    monkeypatch.setattr(specification, "CHUNK", CHUNK)


def seed_of(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_name_is_a_seed(count: int, short_chunks: None) -> None:
    sizes = [(29 * place) % 45 for place in range(count)]
    data = {f"t{p}": torch.randint(0, 256, (size,)).byte() for p, size in enumerate(sizes)}
    rows = [Rows(one, 0, seed_of(name)) for name, one in data.items() if len(one)]
    assert checksum_of(data) == specification.checksum(rows)


def test_a_tensor_without_dimensions_has_one() -> None:
    number = torch.tensor(3.5, dtype=torch.float64)
    assert checksum_of({"x": number}) == checksum_of({"x": number.view(1)})


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


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-rollout", "int8"])
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
            both = (
                [matrix.values, matrix.scales] if isinstance(matrix, QuantisedWeight) else [matrix]
            )
            for tensor in both:
                assert isinstance(tensor, torch.Tensor)
                found[id(tensor)] = tensor
        found |= {
            id(weights.plain[name]): weights.plain[name]
            for name in policy.shapes
            if name in weights.plain
        }
    return list(found.values())
