"""New weights as what has changed of those before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.models import weight_deltas
from isobit.models.weight_deltas import (
    apply_change,
    digest_of,
    files_of,
    parted_names,
    read_file,
    rounded,
)
from isobit.util.errors import ModelError

NAME = "layers.0.o_proj.weight"


def numbers(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@given(
    count=st.integers(1, 700),
    places=st.lists(st.integers(0, 699), max_size=400),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    chunk=st.sampled_from([128, 256, weight_deltas.CHUNK]),
)
def test_a_change_leads_from_the_old_bits_to_the_new(
    count: int, places: list[int], dtype: torch.dtype, chunk: int
) -> None:
    """Through a file; also where almost all numbers change, and one becomes -0 or a NaN; found in
    one piece or several.
    """
    old = numbers(count, dtype)
    new = old.clone()
    for at in places:
        new[at % count] = [-0.0, float("nan"), 3.0][at % 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_deltas, "CHUNK", chunk)
        _, change = rounded(new, new.dtype, old)
    named = {f"{NAME}.{suffix}" if suffix else NAME: values for suffix, values in change.items()}
    (file,) = files_of(named)
    held = old.clone()
    for parts in parted_names(read_file(bytearray(b"".join(file)))).values():
        if "" in parts:
            held = parts[""]
        else:
            apply_change(held, parts, NAME)
    assert torch.equal(held.view(torch.uint8), new.view(torch.uint8))
    assert digest_of({NAME: held}) == digest_of({NAME: new})
    assert bool(change) == (not torch.equal(old.view(torch.uint8), new.view(torch.uint8)))
    assert sum(map(len, file)) <= new.nbytes + 400


def test_one_number_costs_three_bytes() -> None:
    old = torch.zeros(128 * 1000, dtype=torch.bfloat16)
    new = old.clone()
    new[::1000] = 1
    _, change = rounded(new, new.dtype, old)
    assert {name: one.nbytes for name, one in change.items()} == {
        "counts": 1000, "places": 128, "values": 256
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [2, 0]}, "has 2 blocks, 3 places and 3 values"),
        ({"counts": [3]}, "has 1 blocks, 3 places and 3 values, and the tensor 2 blocks"),
        ({"places": [5, 4, 0]}, "do not ascend within"),
        ({"places": [4, 4, 0]}, "do not ascend within"),
        ({"places": [4, 5, 100]}, "do not ascend within"),
        ({"places": [4, 200, 0]}, "do not ascend within"),
        ({"values": None}, "one is missing"),
        ({"values": torch.zeros(3)}, "has the formats"),
    ],
)
def test_a_change_that_fits_nothing_is_refused(changes: dict, message: str) -> None:
    held = numbers(200)
    before = held.clone()
    change = {
        "counts": torch.tensor([2, 1], dtype=torch.uint8),
        "places": torch.tensor([4, 5, 7], dtype=torch.uint8),
        "values": torch.ones(3, dtype=torch.bfloat16),
    }
    for name, value in changes.items():
        if value is None:
            del change[name]
        else:
            change[name] = torch.as_tensor(value, dtype=None if name == "values" else torch.uint8)
    with pytest.raises(ModelError, match=message):
        apply_change(held, change, NAME)
    assert torch.equal(held, before)


def test_files_are_of_a_limited_size_and_hold_changes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_deltas, "MOST", 3000)
    tensors = {f"{at}.weight": numbers(500) for at in range(5)}
    tensors |= {f"x.weight.{suffix}": numbers(450) for suffix in ("counts", "places", "values")}
    found = [read_file(bytearray(b"".join(file))) for file in files_of(tensors)]
    assert [len(one) for one in found] == [3, 2, 3]
    together = {name: values for one in found for name, values in one.items()}
    assert together.keys() == tensors.keys()
    assert all(torch.equal(values, tensors[name]) for name, values in together.items())


def test_the_digest_names_names_formats_shapes_and_bytes() -> None:
    tensors = {"a": numbers(6), "b": numbers(6, torch.float32)}
    others = [
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["a"].view(2, 3), "b": tensors["b"]},
        {"a": tensors["a"].view(torch.int16).to(torch.int32), "b": tensors["b"]},
        {"a": tensors["a"], "b": tensors["b"] + 1},
    ]
    found = {digest_of(one) for one in (tensors, *others)}
    assert len(found) == 5
    assert digest_of(dict(reversed(tensors.items()))) == digest_of(tensors)
