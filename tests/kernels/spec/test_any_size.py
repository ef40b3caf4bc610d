"""Matrices of any size in E4M3: blocks begin anew at each part that is fused, and may be short."""

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.linear import dequantise_rows, dequantised, output_gradient
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor, ScaleKind, block_sizes
from tests.kernels.comparison import same

SHAPES = [
    ((576, 192, 192), 576),  # Q, K and V of SmolLM2-135M
    ((200, 200), 72),
    ((129,), 257),
    ((1, 127, 128), 960),
]


def outliers(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * torch.exp(2 * torch.randn(rows, columns))).bfloat16()


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
            assert same(made.values[block], alone.values)
            column += width
        row += height


@pytest.mark.parametrize(("parts", "columns"), SHAPES)
def test_a_matrix_is_its_values_times_their_scales(parts: tuple[int, ...], columns: int) -> None:
    matrix = quantise_blocks(outliers(sum(parts), columns), parts=parts)
    of_rows = matrix.scales.repeat_interleave(torch.tensor(block_sizes(parts)), 0)
    scales = of_rows.repeat_interleave(torch.tensor(block_sizes((columns,))), 1)
    site = Site("w", "linear", "e4m3", parts=parts)
    exact = matrix.values.double() * scales.double()
    assert torch.equal(dequantised(LinearWeight(site, matrix)).double(), exact)


def test_the_groups_of_an_outputs_gradient_follow_the_parts() -> None:
    """A part of tiny gradients beside one of large ones keeps a scale of its own."""
    site = Site("w", "linear", "e4m3", "power_of_two", "e4m3", "e4m3", (64, 64))
    dy = torch.cat([torch.full((3, 64), 1e-9), torch.ones(3, 64)], 1).bfloat16()
    rows = output_gradient(dy, site).rows
    assert isinstance(rows, QuantTensor) and rows.scales.shape == (3, 2)
    assert torch.equal(dequantise_rows(rows)[:, :64] > 0, torch.ones(3, 64, dtype=torch.bool))
