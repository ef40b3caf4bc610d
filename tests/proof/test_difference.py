"""What observed rows stand for."""

import pytest
import torch

from isobit.kernels.spec.quantise import quantise_rows
from isobit.proof.difference import Checksums, dequantise, first_difference
from isobit.proof.observation import row_checksums, token_keys


def test_rows_whose_last_group_is_short() -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    rows = quantise_rows(x)
    torch.testing.assert_close(dequantise(rows.values, rows.scales), x, rtol=1 / 16, atol=1e-2)


def checksums(*keys: int) -> Checksums:
    made = Checksums()
    made("embed_tokens", torch.tensor(keys), torch.tensor(keys)[:, None].float(), None)
    return made


def test_rows_of_one_side_are_a_difference_but_for_the_last_token_of_a_sample() -> None:
    last = torch.tensor([3])
    assert first_difference(checksums(1, 2), checksums(1, 2, 3), last) is None
    for rollout, training, alone in (
        ((1, 2, 7), (1, 2, 3), {"rollout": [7], "training": []}),
        ((1,), (1, 2, 3), {"rollout": [], "training": [2]}),
    ):
        found = first_difference(checksums(*rollout), checksums(*training), last)
        assert found is not None and found.lacks_rows
        assert {side: keys.tolist() for side, keys in found.alone.items()} == alone


def test_an_operation_of_one_side_alone_is_a_difference() -> None:
    found = first_difference(Checksums(), checksums(1), torch.empty(0, dtype=torch.int64))
    assert found is not None and found.site == "embed_tokens"


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_one_checksum_in_any_batch(dtype: torch.dtype) -> None:
    rows = random_bits((40, 3, 32), dtype)
    whole = row_checksums(rows)
    order = torch.randperm(40)
    shuffled = rows.view(torch.uint8)[order].view(dtype)
    assert torch.equal(row_checksums(shuffled), whole[order])
    assert torch.equal(torch.cat([row_checksums(part) for part in rows.split([1, 7, 32])]), whole)
    assert whole.unique().numel() == 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    row = random_bits((1, 24), dtype)
    flipped = row.view(torch.uint8).repeat(8 * row.view(torch.uint8).numel(), 1)
    for bit in range(flipped.shape[0]):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    checksums = torch.cat([row_checksums(row), row_checksums(flipped.view(dtype))])
    assert checksums.unique().numel() == checksums.numel()


def test_bits_count_and_not_values() -> None:
    zeros = torch.tensor([[0.0], [-0.0], [torch.nan], [torch.nan]])
    a, b, c, d = row_checksums(zeros).tolist()
    assert (a != b, c == d) == (True, True)


def test_scales_count() -> None:
    values = random_bits((4, 128), torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [2.0], [1.0], [2.0]])
    assert torch.equal(row_checksums(values, scales)[:1], row_checksums(values[:1], scales[:1]))
    assert (row_checksums(values, scales) != row_checksums(values, scales.flip(0))).all()


def test_rows_of_int8_have_one_scale() -> None:
    values = torch.tensor([[3, -127], [4, 0]], dtype=torch.int8)
    scales = torch.tensor([0.5, 2.0])
    assert dequantise(values, scales).tolist() == [[1.5, -63.5], [8.0, 0.0]]
    heads = dequantise(values[None], scales[None])  # one token, two heads
    assert heads.tolist() == [[1.5, -63.5, 8.0, 0.0]]
    assert (row_checksums(values, scales) != row_checksums(values, 2 * scales)).all()


def test_a_key_is_the_prefix_whatever_the_chunks() -> None:
    tokens = torch.randint(0, 100, (30,))
    positions = torch.arange(30)
    whole = token_keys(tokens, positions, torch.tensor([30]), torch.tensor([0]))
    key = torch.tensor([0])
    for chunk, at in zip(tokens.split([1, 9, 20]), positions.split([1, 9, 20]), strict=True):
        keys = token_keys(chunk, at, torch.tensor([len(chunk)]), key)
        assert torch.equal(keys, whole[at])
        key = keys[-1:]


def test_pieces_of_a_ragged_batch_do_not_see_each_other() -> None:
    a, b = torch.randint(0, 100, (2, 12))
    b[:5] = a[:5]
    alone = [token_keys(x, torch.arange(12), torch.tensor([12]), torch.tensor([0])) for x in (a, b)]
    both = token_keys(
        torch.cat([a, b]),
        torch.arange(12).repeat(2),
        torch.tensor([12, 12]),
        torch.zeros(2, dtype=torch.int64),
    )
    assert torch.equal(both, torch.cat(alone))
    assert torch.equal(both[:5], both[12:17])
    assert torch.cat([both[:12], both[17:]]).unique().numel() == 19


def test_token_0_and_an_earlier_end_are_different_prefixes() -> None:
    keys = token_keys(
        torch.zeros(8, dtype=torch.int64), torch.arange(8), torch.tensor([8]), torch.tensor([0])
    )
    assert keys.unique().numel() == 8
