"""Every value that a quantiser can meet has one defined result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.kernels.spec.e4m3 import decode_e4m3
from isobit.kernels.spec.quantise import (
    quantise_blocks,
    quantise_heads,
    quantise_rows,
    quantise_tokens,
    scale_byte,
    scale_of_byte,
)
from isobit.precision.formats import E4M3, ScaleKind

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return decode_e4m3(values) * scale


def row_of(*numbers: float) -> torch.Tensor:
    row = torch.zeros(1, 128)
    row[0, : len(numbers)] = torch.tensor(numbers)
    return row


def test_decode_equals_torch_for_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    expected = codes.float()
    finite = ~expected.isnan()
    assert finite.sum() == 254
    assert torch.equal(decode_e4m3(codes)[finite], expected[finite])
    assert torch.equal(torch.signbit(decode_e4m3(codes)), torch.arange(256) >= 128)


@given(st.floats(min_value=2.0**-60, max_value=2.0**127, width=32))
def test_power_of_two_scale_is_the_smallest_that_fits(amax: float) -> None:
    scale = float(scale_of_byte(scale_byte(torch.tensor([amax]))))
    assert 224.0 < amax / scale <= 448.0


def test_scale_bytes_at_the_edges() -> None:
    amax = torch.tensor(
        [448.0, 449.0, 224.0, 0.0, 1e-30, 2.0**-60, torch.inf, torch.nan, -torch.nan]
    )
    assert scale_byte(amax.abs()).tolist() == [127, 128, 126, 59, 59, 59, 255, 255, 255]


@pytest.mark.parametrize("kind", KINDS)
def test_zero_block(kind: ScaleKind) -> None:
    x = torch.zeros(1, 128)
    x[0, 1] = -0.0
    quantised = quantise_rows(x, kind)
    expected = torch.zeros(128, dtype=torch.uint8)
    expected[1] = 0x80
    assert torch.equal(quantised.values.view(torch.uint8)[0], expected)
    assert quantised.scales.isfinite().all() and (quantised.scales > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_values_up_to_448_scales_and_subnormals(kind: ScaleKind) -> None:
    x = row_of(448.0, -448.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 447.0, 17.0, 19.0)
    quantised = quantise_rows(x, kind)
    assert quantised.scales.item() == 1.0
    # 2^-10 is a tie between 0 and 2^-9, 3 2^-10 between 2^-9 and 2^-8, 17 and 19 between multiples
    # of 2: to the even mantissa
    assert decode_e4m3(quantised.values)[0, :8].tolist() == [
        448.0,
        -448.0,
        2.0**-9,
        0.0,
        2.0**-8,
        448.0,
        16.0,
        20.0,
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_marked_whole(kind: ScaleKind, bad: float) -> None:
    x = torch.randn(2, 256)
    x[1, 130] = bad
    quantised = quantise_rows(x, kind)
    assert quantised.scales.isnan().tolist() == [[False, False], [False, True]]
    assert quantised.scales.view(torch.int32)[1, 1].item() == 0x7FC00000
    assert (quantised.values.view(torch.uint8)[1, 128:] == 0x7F).all()
    assert torch.equal(
        quantised.values.view(torch.uint8)[0],
        quantise_rows(x[:1], kind).values.view(torch.uint8)[0],
    )
    assert (decode_e4m3(quantised.values)[1, 128:] * quantised.scales[1, 1]).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_1e_minus_12_survive(kind: ScaleKind) -> None:
    x = torch.randn(4, 128) * 1e-12
    quantised = quantise_rows(x, kind)
    error = dequantise(quantised.values, quantised.scales) - x
    assert error.norm() < 0.04 * x.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.0, 2.0, 15.0])
def test_rows_against_the_formula_in_fp64(kind: ScaleKind, spread: float) -> None:
    x = (torch.randn(64, 384) * torch.exp(spread * torch.randn(64, 384))).bfloat16()
    quantised = quantise_rows(x, kind)
    blocks = x.double().view(64, 3, 128)
    amax = blocks.abs().amax(-1)
    scale = (
        torch.exp2(torch.ceil(torch.log2(amax / 448)))
        if kind == "power_of_two"
        else (amax.float() / 448).double()
    )
    assert torch.equal(quantised.scales.double(), scale)
    divided = (
        blocks / scale[..., None]
        if kind == "power_of_two"
        else (blocks.float() / scale.float()[..., None])
    )
    expected = divided.float().clamp(-448, 448).to(E4M3).view(64, 384)
    assert torch.equal(quantised.values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_granularities_agree_with_rows(kind: ScaleKind) -> None:
    x = torch.randn(256, 384).bfloat16()
    blocks = quantise_blocks(x, kind)
    for i, j in ((0, 0), (1, 2)):
        block = x[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scaled = block.float() / blocks.scales[i, j]
        assert scaled.abs().max() <= 448 * (1 + 2e-7) and scaled.abs().max() > 223
    tokens = quantise_tokens(x, kind)
    transposed = quantise_rows(x.t().contiguous(), kind)
    assert torch.equal(tokens.values.view(torch.uint8), transposed.values.view(torch.uint8).t())
    assert torch.equal(tokens.scales, transposed.scales.t())


def test_a_short_last_group_of_tokens_is_its_own() -> None:
    x = torch.randn(200, 128).bfloat16()
    whole, tail = quantise_tokens(x), quantise_tokens(x[128:])
    assert whole.scales.shape == (2, 128)
    assert torch.equal(whole.values.view(torch.uint8)[128:], tail.values.view(torch.uint8))
    assert torch.equal(whole.scales[1:], tail.scales)


def test_heads_have_one_scale_a_vector_and_mark_nan() -> None:
    x = torch.randn(5, 3, 64)
    x[2, 1, 7] = torch.inf
    values, byte = quantise_heads(x)
    assert byte[2, 1].item() == 255 and (byte == 255).sum() == 1
    assert (values.view(torch.uint8)[2, 1] == 0x7F).all()
    error = decode_e4m3(values) * scale_of_byte(byte)[..., None] - x
    finite = byte != 255
    assert (error[finite].norm() / x[finite].norm()) < 0.04
