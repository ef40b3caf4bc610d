"""The table of rotary positions."""

import torch

from isobit.kernels.rope import RopeTable

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)


def test_angles_are_rounded_once_from_fp64() -> None:
    table = RopeTable.build(FREQUENCIES, 50_000)
    angles = torch.arange(50_000, dtype=torch.float64)[:, None] * FREQUENCIES
    assert torch.equal(table.cos, angles.cos().float())
    assert torch.equal(table.sin, angles.sin().float())


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    short, long = (RopeTable.build(FREQUENCIES, n) for n in (37, 400))
    assert torch.equal(short.cos, long.cos[:37]) and torch.equal(short.sin, long.sin[:37])


def test_rows_are_those_of_the_positions_and_broadcast_over_heads() -> None:
    table, positions = RopeTable.build(FREQUENCIES, 50), torch.tensor([3, 0, 49, 3])
    rows = table.rows(positions)
    assert rows.cos.shape == rows.sin.shape == (4, 1, 4)
    assert torch.equal(rows.cos[:, 0], table.cos[positions])
    assert torch.equal(rows.backward().sin[:, 0], -table.sin[positions])
    assert torch.equal(rows.backward().cos, rows.cos)


def test_an_attention_factor_multiplies_cosines_and_sines_before_they_are_rounded() -> None:
    table = RopeTable.build(FREQUENCIES, 1000, attention_scaling=1.3)
    angles = torch.arange(1000, dtype=torch.float64)[:, None] * FREQUENCIES
    assert torch.equal(table.cos, (angles.cos() * 1.3).float())
    assert torch.equal(table.sin, (angles.sin() * 1.3).float())
