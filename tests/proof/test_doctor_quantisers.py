"""The stored bytes come from the specification, and the specification is what the formats say."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.proof.doctor_quantisers import golden_file, load_golden
from tests.proof.golden import (
    e4m3_byte,
    e4m3_value,
    int8_group,
    power_of_two_from,
    quantise_group,
    rotated,
    save_golden,
    snap_group,
)


def test_the_file_is_what_its_script_makes(tmp_path: Path) -> None:
    save_golden(tmp_path / "golden.safetensors")
    assert (tmp_path / "golden.safetensors").read_bytes() == golden_file().read_bytes()


def test_the_inputs_hold_every_edge() -> None:
    x = load_golden()["rows.input"]
    assert x.isnan().any() and (x == torch.inf).any() and (x == -torch.inf).any()
    assert ((x == 0) & x.signbit()).any() and ((x == 0) & ~x.signbit()).any()
    assert ((x.abs() > 0) & (x.abs() < 2.0**-126)).any(), "subnormals of FP32"
    amax = x.abs().amax(-1)
    assert (amax == 448).any() and (amax == torch.finfo(torch.float32).max).any()
    assert ((amax > 1e-13) & (amax < 1e-9)).any()


@given(st.floats(min_value=-448.0, max_value=448.0, width=32))
def test_e4m3_bytes_are_those_of_torchs_cast(x: float) -> None:
    assert e4m3_byte(x) == torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).item()


def test_e4m3_bytes_and_values_are_inverse() -> None:
    for byte in range(256):
        if byte & 0x7F != 0x7F:
            assert e4m3_byte(e4m3_value(byte)) == byte


@pytest.mark.parametrize(
    ("x", "expected"), [(1.0, 1.0), (1.001, 2.0), (0.75, 1.0), (2.0**-70, 2.0**-70), (2.5, 4.0)]
)
def test_power_of_two(x: float, expected: float) -> None:
    assert power_of_two_from(x) == expected


def test_groups_by_hand() -> None:
    assert quantise_group([448.0, -0.0, 17.0], "power_of_two") == ([0x7E, 0x80, 0x58], 1.0)
    assert quantise_group([449.0], "power_of_two")[1] == 2.0
    assert quantise_group([1.0, torch.inf], "fp32")[0] == [0x7F, 0x7F]
    assert snap_group([1.0, 2.0**-23, 3 * 2.0**-23]) == [1.0, 0.0, 2.0**-21]


def test_int8_by_hand() -> None:
    assert int8_group([127.0, -0.5, 1.5, -2.5]) == ([127, 0, 2, -2], 1.0)
    assert int8_group([1.0, -torch.inf])[0] == [0, 0]
    assert rotated([1.0, 2.0, 4.0, 8.0, 1.0, 0.0, 0.0, 0.0], 4) == [15, -5, -9, 3, 1, 1, 1, 1]
