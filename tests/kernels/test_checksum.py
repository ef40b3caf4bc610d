"""A checksum of bytes: the sum of its definition, and other for whatever goes wrong on the way."""

import pytest
import torch

from isobit.kernels import checksum as kernel
from isobit.kernels.checksum import checksum, combined
from isobit.kernels.noise import splitmix64_of

BYTES = torch.randint(0, 256, (40, 24), dtype=torch.uint8, generator=torch.manual_seed(0))


def by_definition(data: bytes, piece: int) -> int:
    """The sum in Python's integers."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = 0
    for place, word in enumerate(words):
        number, within = divmod(place, piece)
        total += word * (splitmix64_of(12, number) | 1) * (splitmix64_of(11, within) | 1)
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 96, 321, 960])
def test_the_sum_is_that_of_the_definition_in_one_piece_and_in_several(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = BYTES.view(-1)[:size].clone()
    for piece in (1 << 20, 7):
        monkeypatch.setattr(kernel, "_PIECE", piece)
        kernel._weights.cache_clear()
        assert int(checksum(data)) % 2**64 == by_definition(bytes(data.tolist()), piece)
    kernel._weights.cache_clear()


def test_one_bit_and_any_change_of_places_are_seen() -> None:
    first = int(checksum(BYTES))
    for place in (0, 8, 500, 959):
        for bit in range(8):
            other = BYTES.clone()
            other.view(-1)[place] ^= 1 << bit
            assert int(checksum(other)) != first
    words = BYTES.view(torch.int64)
    for other in (words.flip(0), words.flip(1), words.T.contiguous(), words.roll(1, 0)):
        assert sorted(other.flatten().tolist()) == sorted(words.flatten().tolist())
        assert int(checksum(other)) != first
    assert int(checksum(BYTES[:39])) != first


def test_bytes_of_any_format_have_the_same_and_tensors_have_their_places() -> None:
    first = checksum(BYTES)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64):
        assert torch.equal(checksum(BYTES.view(dtype)), first)
    parts = [checksum(BYTES[:20]), checksum(BYTES[20:])]
    assert combined(parts) != combined(parts[::-1])
