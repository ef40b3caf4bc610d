"""Matrices of any size in E4M3: blocks begin anew at each part that is fused, and may be short."""

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.linear import (
    dequantise_rows,
    dequantised,
    dgrad,
    fp8_gemm_nt,
    linear,
    linear_input,
    output_gradient,
    wgrad,
)
from isobit.kernels.spec.quantise import publish, quantise_blocks, quantise_rows, republish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor, ScaleKind, block_sizes

SHAPES = [
    ((576, 192, 192), 576),  # Q, K and V of SmolLM2-135M
    ((200, 200), 72),
    ((129,), 257),
    ((1, 127, 128), 960),
]


def outliers(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * torch.exp(2 * torch.randn(rows, columns))).bfloat16()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def make(parts: tuple[int, ...], columns: int, kind: ScaleKind) -> LinearWeight:
    site = Site("w", "linear", "e4m3", kind, "e4m3", "e4m3", parts)
    return LinearWeight(site, publish(site, outliers(sum(parts), columns).float()))


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize(("parts", "columns"), SHAPES)
def test_a_fused_matrix_is_its_parts_one_below_the_other(
    parts: tuple[int, ...], columns: int, kind: ScaleKind
) -> None:
    """So a checkpoint's matrix has the bytes and scales that it has alone."""
    x = outliers(sum(parts), columns)
    fused = quantise_blocks(x, kind, parts)
    alone = [quantise_blocks(part, kind) for part in x.split(list(parts))]
    assert same_bytes(fused.values, torch.cat([part.values.view(torch.uint8) for part in alone]))
    assert torch.equal(fused.scales, torch.cat([part.scales for part in alone]))


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize(("parts", "columns"), SHAPES)
def test_each_block_has_the_scale_of_its_own_numbers(
    parts: tuple[int, ...], columns: int, kind: ScaleKind
) -> None:
    """Every block, cut out and quantised as a matrix of its own."""
    x = outliers(sum(parts), columns)
    made, row = quantise_blocks(x, kind, parts), 0
    for i, height in enumerate(block_sizes(parts)):
        column = 0
        for j, width in enumerate(block_sizes((columns,))):
            block = slice(row, row + height), slice(column, column + width)
            alone = quantise_blocks(x[block].contiguous(), kind)
            assert alone.scales.item() == made.scales[i, j]
            assert same_bytes(made.values[block].contiguous(), alone.values)
            column += width
        row += height


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize(("parts", "columns"), SHAPES)
def test_parts_do_not_depend_on_each_other(
    parts: tuple[int, ...], columns: int, kind: ScaleKind
) -> None:
    weight, x = make(parts, columns, kind), outliers(70, columns)
    assert isinstance(weight.matrix, QuantTensor)
    whole = linear(linear_input(x, weight.site).read, weight)
    values, scales = weight.matrix.values.split(list(parts)), weight.matrix.scales
    counts = [len(block_sizes((part,))) for part in parts]
    for part, scale, expected in zip(
        values, scales.split(counts), whole.split(list(parts), 1), strict=True
    ):
        alone = QuantTensor(part, scale, "128x128")
        assert torch.equal(fp8_gemm_nt(quantise_rows(x, kind), alone).bfloat16(), expected)


@pytest.mark.parametrize(("parts", "columns"), SHAPES)
def test_products_are_those_of_the_dequantised_matrix(parts: tuple[int, ...], columns: int) -> None:
    weight, x = make(parts, columns, "power_of_two"), outliers(150, columns)
    assert isinstance(weight.matrix, QuantTensor)
    exact = weight.matrix.values.double() * torch.cat(
        [
            weight.matrix.row_scales()[:, j, None].double().expand(-1, width)
            for j, width in enumerate(block_sizes((columns,)))
        ],
        1,
    )
    assert torch.equal(dequantised(weight).double(), exact)
    rows = quantise_rows(x)
    product = dequantise_rows(rows).double() @ exact.t()
    yardstick = (dequantise_rows(rows) @ exact.float().t() - product).norm()
    assert (fp8_gemm_nt(rows, weight.matrix) - product).norm() <= 2 * yardstick
    dy = torch.randn(150, sum(parts)).bfloat16()
    gradient, grad = output_gradient(dy, weight.site), torch.zeros(sum(parts), columns)
    saved = linear_input(x, weight.site, save=True).saved
    assert saved is not None
    wgrad(gradient.tokens, saved, grad)
    for made, wanted in (
        (dgrad(gradient.rows, weight).double(), dy.double() @ exact),
        (grad.double(), dy.double().t() @ x.double()),
    ):
        cosine = (made * wanted).sum() / (made.norm() * wanted.norm())
        assert cosine >= 0.9985


def test_the_groups_of_an_outputs_gradient_follow_the_parts() -> None:
    """A part of tiny gradients beside one of large ones keeps a scale of its own."""
    site = Site("w", "linear", "e4m3", "power_of_two", "e4m3", "e4m3", (64, 64))
    dy = torch.cat([torch.full((3, 64), 1e-9), torch.ones(3, 64)], 1).bfloat16()
    rows = output_gradient(dy, site).rows
    assert isinstance(rows, QuantTensor) and rows.scales.shape == (3, 2)
    assert torch.equal(dequantise_rows(rows)[:, :64] > 0, torch.ones(3, 64, dtype=torch.bool))


def test_publishing_again_overwrites_in_place() -> None:
    weight = make((200, 200), 72, "power_of_two")
    assert isinstance(weight.matrix, QuantTensor)
    before = weight.matrix.values.clone()
    other = outliers(400, 72).float()
    assert int(republish(weight, other)) > 0
    assert not same_bytes(before, weight.matrix.values)
    assert same_bytes(weight.matrix.values, quantise_blocks(other, parts=(200, 200)).values)
