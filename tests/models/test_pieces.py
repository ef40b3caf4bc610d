"""Tensors in pieces are what they are in one."""

import pytest
import torch

from isobit.models import pieces
from isobit.precision.formats import E4M3


def test_finite_numbers() -> None:
    x = torch.randn(5, 7)
    assert pieces.is_finite(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 3] = value
        assert not pieces.is_finite(x)


def test_pieces_land_in_rows_of_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 10)
    target, source = torch.zeros(9, 4), torch.randn(5, 4).bfloat16()
    pieces.copy_in_pieces(target[2:7], source)
    assert torch.equal(target[2:7], source.float())
    assert not target[:2].any() and not target[7:].any()


def test_equality_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 10)
    x = torch.randn(9, 4)
    assert pieces.is_equal_in_pieces(x, x.clone())
    for place in (0, 35):
        other = x.clone()
        other.view(-1)[place] += 1
        assert not pieces.is_equal_in_pieces(x, other)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_both_nans_of_e4m3_are_found_and_no_other_byte(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 10)
    every = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F], dtype=torch.uint8)
    assert not pieces.holds_nan_byte(every.view(E4M3))
    every[200] = byte
    assert pieces.holds_nan_byte(every.view(E4M3))
