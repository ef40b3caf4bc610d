"""Figures of quantised matrices against their definitions."""

import pytest
import torch

from isobit.kernels.spec.quantise import quantise_blocks
from isobit.observe.inspection.quantised import (
    Fp8Figures,
    measure_published,
    measure_stored,
    together,
)
from isobit.precision.dequantise import dequantise
from isobit.precision.formats import E4M3
from isobit.precision.quant_tensor import QuantTensor


def test_a_matrix_worked_out_by_hand() -> None:
    """One block with the scale 2: 896 is the largest; 17, half way from 16 to 18, goes to 16, whose
    mantissa is even; 0.001 is flushed.
    """
    x = torch.zeros(2, 3)
    x[0] = torch.tensor([896.0, 17.0, 0.001])
    x[1, 0] = 64.0
    figures = measure_published(x, quantise_blocks(x))
    squares = 896.0**2 + 17.0**2 + 0.001**2 + 64.0**2
    assert figures.smallest_scale == figures.largest_scale == 2.0
    assert figures.error == pytest.approx(((1.0 + 0.001**2) / squares) ** 0.5, rel=1e-6)
    assert figures.worst_block == pytest.approx(figures.error)
    assert figures.saturated == 1 / 6
    assert figures.flushed == 1 / 6


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
def test_several_blocks_and_short_ones(scales) -> None:
    """Against a loop over blocks in FP64."""
    torch.manual_seed(1)
    x = torch.randn(200, 300) * 10.0 ** torch.randint(-4, 4, (200, 1))
    x[128:, 256:] = 0.0
    published = quantise_blocks(x, scales)
    figures = measure_published(x, published)
    q = dequantise(published).double()
    errors = []
    for row in (slice(0, 128), slice(128, 200)):
        for column in (slice(0, 128), slice(128, 256), slice(256, 300)):
            part, difference = x[row, column].double(), (q - x.double())[row, column]
            errors.append(float(difference.norm() / part.norm()) if part.any() else 0.0)
    assert figures.worst_block == pytest.approx(max(errors), rel=1e-6)
    assert figures.error == pytest.approx(
        float((q - x.double()).norm() / x.double().norm()), rel=1e-6
    )
    assert figures.flushed == pytest.approx(float(((q == 0) & (x != 0)).double().mean()))
    assert figures.flushed and figures.flushed > 0
    largest = (published.values.float().abs() == 448).double().mean()
    assert figures.saturated == pytest.approx(float(largest))
    if scales == "fp32":
        assert figures.saturated >= 5 / x.numel(), "each block's largest is the largest byte"


def test_several_matrices_have_the_figures_of_one_made_of_them() -> None:
    torch.manual_seed(2)
    whole = torch.randn(512, 128) * torch.logspace(-3, 3, 4).repeat_interleave(128)[:, None]
    parts = [measure_published(part, quantise_blocks(part)) for part in whole.split(128)]
    one, several = measure_published(whole, quantise_blocks(whole)), together(parts)
    assert several.error == pytest.approx(one.error, rel=1e-9)
    assert (several.worst_block, several.saturated, several.flushed) == (
        one.worst_block,
        one.saturated,
        one.flushed,
    )
    assert (several.smallest_scale, several.largest_scale) == (
        one.smallest_scale,
        one.largest_scale,
    )


def test_of_stored_bytes_only_scales_and_saturation_are_known() -> None:
    values = torch.tensor([[448.0, -448.0, 1.0, 0.0]]).to(E4M3)
    figures = measure_stored(QuantTensor(values, torch.tensor([[0.25]]), "128x128"))
    assert (figures.saturated, figures.smallest_scale, figures.largest_scale) == (0.5, 0.25, 0.25)
    assert figures.error is figures.flushed is figures.worst_block is None
    mixed = figures + Fp8Figures(4, 0, 0.5, 2.0, 1, 2.0, 0.5, 0.5)
    assert mixed.error is None and mixed.saturated == 0.25 and mixed.largest_scale == 2.0
