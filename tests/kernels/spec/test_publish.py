"""Publishing: the format of the site, from the BF16 rounding, in place the second time."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.linear import dequantised
from isobit.kernels.spec.publish import publish, publish_head, republish
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.parallel.ownership import Ownership
from isobit.precision.flow import Site
from isobit.precision.formats import Format
from isobit.precision.quant_tensor import QuantTensor


def site(forward: Format) -> Site:
    return Site("w", "linear", forward, dgrad=forward, wgrad=forward)


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """NaNs compare, too."""
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def bits(weight: LinearWeight) -> torch.Tensor:
    matrix = weight.matrix
    return matrix.values.view(torch.uint8) if isinstance(matrix, QuantTensor) else matrix  # type: ignore[return-value]


def test_a_matrix_is_made_from_the_bf16_rounding_except_in_fp32() -> None:
    master = torch.randn(256, 384)
    made = publish(site("e4m3"), master)
    assert isinstance(made, QuantTensor)
    expected = quantise_blocks(master.bfloat16())
    assert torch.equal(made.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(made.scales, expected.scales)
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
    place, before = bits(weight).data_ptr(), bits(weight).clone()
    assert int(republish(weight, master)) == 0
    other = master.detach().clone()
    other[5:7] *= -1
    assert int(republish(weight, other)) == 2 * 256
    newer = LinearWeight(site(forward), publish(site(forward), other))
    assert bits(weight).data_ptr() == place
    assert torch.equal(dequantised(weight), dequantised(newer))
    assert int((bits(weight) != before).sum()) == 2 * 256


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
    assert torch.equal(as_integers(bits(weight)), as_integers(bits(whole)))
    zeros = LinearWeight(whole_site, publish(whole_site, torch.zeros_like(master)))
    assert changed == int(republish(zeros, master))
    if isinstance(weight.matrix, QuantTensor) and isinstance(whole.matrix, QuantTensor):
        assert torch.equal(as_integers(weight.matrix.scales), as_integers(whole.matrix.scales))


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
        made = publish_head(table)
        assert made.dtype == table.dtype and torch.equal(made, snap_rows(table))
