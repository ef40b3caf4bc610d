"""Quantising what the doctor's stored bytes (``isobit.proof.doctor_quantisers``) do not hold.

Publishing: the format of the site, from the BF16 rounding, in place the second time.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.linear import dequantised
from isobit.kernels.spec.quantise import (
    decode_e4m3,
    publish,
    publish_head,
    quantise_blocks,
    quantise_heads,
    quantise_rows,
    republish,
    scale_byte,
    scale_of_byte,
    snap_rows,
)
from isobit.parallel.ownership import Ownership
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format, Int8Rows, QuantTensor, ScaleKind
from isobit.proof.doctor_findings import Check
from isobit.proof.doctor_quantisers import quantiser_checks
from tests.kernels.comparison import bits, same

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]


def row_of(*numbers: float) -> torch.Tensor:
    row = torch.zeros(1, 128)
    row[0, : len(numbers)] = torch.tensor(numbers)
    return row


@pytest.mark.parametrize("check", quantiser_checks(), ids=lambda check: check.name)
def test_the_bytes_are_the_doctors_stored_ones(check: Check) -> None:
    finding = check.find()
    assert finding.status != "fail", finding


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
    assert same(quantised.values[:1], quantise_rows(x[:1], kind).values)
    assert (decode_e4m3(quantised.values)[1, 128:] * quantised.scales[1, 1]).isnan().all()


def site(forward: Format) -> Site:
    return Site("w", "linear", forward, dgrad=forward, wgrad=forward)


def values_of(weight: LinearWeight) -> torch.Tensor:
    return weight.matrix if isinstance(weight.matrix, torch.Tensor) else weight.matrix.values


def test_a_matrix_is_made_from_the_bf16_rounding_except_in_fp32() -> None:
    master = torch.randn(256, 384)
    made = publish(site("e4m3"), master)
    assert same(made, quantise_blocks(master.bfloat16()))
    plain_formats: dict[Format, torch.Tensor] = {"bf16": master.bfloat16(), "fp32": master}
    for format, source in plain_formats.items():
        plain = publish(site(format), master)
        assert isinstance(plain, torch.Tensor) and plain.dtype == source.dtype
        assert torch.equal(plain, snap_rows(source))
        assert plain.data_ptr() != master.data_ptr()


@pytest.mark.parametrize("forward", ["e4m3", "bf16", "fp32"])
def test_publishing_again_overwrites_in_place_and_counts_the_numbers_that_change(
    forward: Format,
) -> None:
    master = torch.nn.Parameter(torch.randn(384, 256))
    weight = LinearWeight(site(forward), publish(site(forward), master))
    place, before = values_of(weight).data_ptr(), bits(values_of(weight)).clone()
    assert int(republish(weight, master)) == 0
    other = master.detach().clone()
    other[5:7] *= -1
    assert int(republish(weight, other)) == 2 * 256
    newer = LinearWeight(site(forward), publish(site(forward), other))
    assert values_of(weight).data_ptr() == place
    assert torch.equal(dequantised(weight), dequantised(newer))
    assert int((bits(values_of(weight)) != before).sum()) == 2 * 256


@pytest.mark.parametrize("parts", [(576, 192, 192), (256, 128, 72), (300,), ()])
@pytest.mark.parametrize("forward", ["e4m3", "bf16", "fp32"])
def test_pieces_of_rows_are_published_as_the_whole(forward: Format, parts: tuple[int, ...]) -> None:
    rows = sum(parts) or 300
    master = torch.randn(rows, 200) * torch.exp(4 * torch.randn(rows, 200))
    master[130, 3] = torch.nan  # of one block, in one piece
    whole_site = replace(site(forward), parts=parts)
    whole = LinearWeight(whole_site, publish(whole_site, master), torch.arange(rows))
    weight = LinearWeight(whole_site, publish(whole_site, torch.zeros_like(master)), whole.bias)
    cuts = Ownership.of({"w": (rows, 200)}, {"w": parts}, 4).cuts["w"]
    assert cuts[1] and len(set(cuts)) > 3
    changed = 0
    for first, last in pairwise(cuts):
        piece = weight.rows(first, last)
        assert piece.bias is not None
        assert piece.bias.tolist() == list(range(first, last))
        changed += int(republish(piece, master[first:last]))
        assert int(republish(weight.rows(first, first), master[first:first])) == 0  # owns no rows
    assert same(weight.matrix, whole.matrix)
    zeros = LinearWeight(whole_site, publish(whole_site, torch.zeros_like(master)))
    assert changed == int(republish(zeros, master))


def test_rows_begin_where_a_block_does() -> None:
    weight = LinearWeight(
        Site("w", "linear", "e4m3", parts=(576, 192)),
        QuantTensor.empty_blocks(768, 64, torch.device("cpu"), (576, 192)),
    )
    piece = weight.rows(512, 704)
    assert isinstance(piece.matrix, QuantTensor)
    assert piece.site.parts == piece.matrix.parts == (64, 128)
    with pytest.raises(AssertionError):
        weight.rows(512, 640)  # inside the block from 576 to 704


def test_the_head_is_on_the_grid_in_its_own_format() -> None:
    for table in (torch.randn(200, 128), torch.randn(200, 128).bfloat16()):
        made = publish_head(Site("lm_head", "head", "bf16"), table)
        assert made.int8 is None and made.table.dtype == table.dtype
        assert torch.equal(made.table, snap_rows(table))


def test_an_int8_head_has_the_rows_of_a_linear_and_its_table_and_is_written_in_place() -> None:
    table, site = torch.randn(200, 72).bfloat16(), Site("lm_head", "head", "int8")
    made = publish_head(site, table)
    linear = publish(Site("w", "linear", "int8", parts=(200,)), table.float())
    assert made.int8 is not None and isinstance(linear, Int8Rows) and made.table is table
    assert torch.equal(made.int8.values, linear.values)
    assert torch.equal(made.int8.scales, linear.scales)
    table.neg_()
    before, again = made.int8.values.clone(), publish_head(site, table, made)
    assert again is made and torch.equal(made.int8.values, -before)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_given_scale_hides_no_vector_that_is_not_finite(wrong: float) -> None:
    x = torch.randn(3, 2, 8)
    x[1, 0, 5] = wrong
    given = torch.full((3, 2), 120, dtype=torch.uint8)
    scales = quantise_heads(x, given)[1]
    expected = given.clone()
    expected[1, 0] = 255
    assert torch.equal(scales, expected)
