"""The table of rotary positions."""

import pytest
import torch

from isobit.kernels.observing import is_observed, observe, observing, rounded
from isobit.kernels.operands import RopeTable

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


Seen = list[tuple[str, torch.Tensor, torch.Tensor | None]]


def recorder(seen: Seen):
    return lambda name, values, scales: seen.append((name, values, scales))


def fail_after(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_an_observer_sees_the_tensors_themselves_under_their_joined_names():
    seen: Seen = []
    values, scales = torch.ones(2, 3), torch.ones(2)
    with observing(recorder(seen)):
        assert observe(values, "layers", 2, "rope.q") is values
        assert observe(values, "norm", scales=scales) is values
    assert [(name, a is values, b) for name, a, b in seen] == [
        ("layers.2.rope.q", True, None),
        ("norm", True, scales),
    ]


def test_nothing_is_done_where_nobody_observes():
    class Name(str):
        def __str__(self) -> str:
            raise AssertionError("a name was joined")

    values = torch.ones(1)
    assert not is_observed()
    assert observe(values, Name("layers")) is values


def test_the_innermost_observer_counts_and_an_error_ends_its_turn():
    outer: Seen = []
    inner: Seen = []
    with observing(recorder(outer)):
        with pytest.raises(ZeroDivisionError), observing(recorder(inner)):
            fail_after(observe(torch.ones(1), "a"))
        observe(torch.ones(1), "b")
    assert ([name for name, *_ in outer], [name for name, *_ in inner]) == (["b"], ["a"])
    assert not is_observed()


def test_what_a_result_was_rounded_from_is_shown_first_and_once():
    seen: Seen = []
    exact = torch.tensor([1.0001])
    with observing(recorder(seen)):
        result = observe(rounded(exact, torch.bfloat16), "norm")
        observe(result, "again")
        observe(rounded(exact, torch.float32), "fp32")
    assert [(name, values is exact) for name, values, _ in seen] == [
        ("norm.unrounded", True),
        ("norm", False),
        ("again", False),
        ("fp32", True),
    ]
    assert torch.equal(rounded(exact, torch.bfloat16), result)
