"""The checksum of bytes: what it is by its formula in whole numbers, and that any changed byte
changes it.
"""

import pytest
import torch

from isobit.kernels.checksum import Rows
from isobit.kernels.noise import splitmix64_of
from isobit.kernels.spec import checksum as module
from isobit.kernels.spec.checksum import checksum

CHUNK = 8


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few words, so that small tensors have several."""
    monkeypatch.setattr(module, "CHUNK", CHUNK)


def by_formula(data: bytes, first_word: int, seed: int) -> int:
    """The same in Python's whole numbers."""
    data += bytes(-len(data) % 4)
    total = 0
    for place in range(0, len(data), 4):
        chunk, inside = divmod(first_word + place // 4, CHUNK)
        word = int.from_bytes(data[place : place + 4], "little", signed=True)
        total += (splitmix64_of(seed, chunk) | 1) * (splitmix64_of(5, inside) | 1) * word
    return total % (1 << 64)


@pytest.mark.parametrize("first", [0, 1, 8, 12_345])
@pytest.mark.parametrize("size", [1, 3, 4, 31, 32, 33, 64, 65, 200])
def test_it_is_what_the_formula_says(size: int, first: int, short_chunks: None) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = by_formula(bytes(data.tolist()), first, -7)
    assert checksum([Rows(data, first, -7)]) == expected


@pytest.mark.parametrize("count", [1, 2, 7])
def test_those_of_many_tensors_add_up(count: int, short_chunks: None) -> None:
    sizes = [1 + (29 * place) % 45 for place in range(count)]
    data = [torch.randint(0, 256, (size,)).byte() for size in sizes]
    expected = sum(by_formula(bytes(one.tolist()), 3, seed) for seed, one in enumerate(data))
    made = checksum([Rows(one, 3, seed) for seed, one in enumerate(data)])
    assert made == expected % (1 << 64)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]
)
def test_any_flipped_bit_of_any_byte_changes_it(dtype: torch.dtype, short_chunks: None) -> None:
    tensor = torch.randint(0, 256, (13 * 5 * 8,), dtype=torch.uint8).view(dtype)
    rows = [Rows(tensor, 0, 1)]
    whole, data = checksum(rows), tensor.view(torch.uint8)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(rows) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert checksum(rows) == whole


def test_a_flipped_bit_of_a_tensor_of_several_chunks_changes_it() -> None:
    """With chunks as they are: a byte in each, and the first and the last."""
    tensor = torch.randn(2_500_000)
    rows = [Rows(tensor, 0, 1)]
    whole, data = checksum(rows), tensor.view(torch.uint8)
    for place in (0, 3, 4_194_303, 4_194_304, 8_388_607, 8_388_608, len(data) - 1):
        data[place] ^= 0x80
        assert checksum(rows) != whole, place
        data[place] ^= 0x80


def test_numbers_mapped_behind_others_need_not_be_aligned() -> None:
    data = torch.randint(0, 256, (42,), dtype=torch.uint8)
    expected = checksum([Rows(data[2:].clone(), 0, 1)])
    assert checksum([Rows(data[2:], 0, 1)]) == expected
    assert checksum([Rows(data[2:].view(torch.bfloat16), 0, 1)]) == expected
