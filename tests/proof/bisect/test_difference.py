"""What observed rows stand for."""

import torch

from isobit.kernels.spec.quantise import quantise_rows
from isobit.proof.bisect.difference import Checksums, dequantise, first_difference


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
