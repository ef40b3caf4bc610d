"""Q, K and V in the flow's formats."""

import pytest
import torch

from isobit.kernels.spec.qkv import Heads, grid_bits, stack_heads
from isobit.kernels.spec.quantise import scale_of_byte
from isobit.precision.quant_tensor import DTYPES, Format


@pytest.mark.parametrize("format", ["e4m3", "bf16", "fp32"])
def test_a_token_is_encoded_by_itself(format: Format) -> None:
    x = torch.randn(9, 2, 64) * torch.exp(5 * torch.randn(9, 2, 1))
    whole = Heads.encode(x, format)
    for t in range(9):
        alone = Heads.encode(x[t : t + 1], format)
        assert torch.equal(alone.units(), whole.units()[t : t + 1]) and torch.equal(
            alone.scales, whole.scales[t : t + 1]
        )
    assert whole.values.dtype == DTYPES[format]


def test_bf16_loses_only_what_lies_22_bits_below_the_largest() -> None:
    x = torch.randn(50, 64).bfloat16()
    assert torch.equal(Heads.encode(x, "bf16").dequantised(), x.float())
    wide = torch.randn(50, 64)
    loss = (Heads.encode(wide, "fp32").dequantised() - wide).abs()
    assert (loss <= wide.abs().amax(-1, keepdim=True) * 2.0**-23).all()


@pytest.mark.parametrize("format", ["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "bits"), [(80, 22), (128, 22), (130, 21), (256, 21)])
def test_units_are_on_the_grid_and_below_two(format: Format, dim: int, bits: int) -> None:
    x = torch.randn(40, dim) * torch.exp(10 * torch.randn(40, 1))
    heads = Heads.encode(x.to(DTYPES[format]), format)
    steps = heads.units().double() * 2**bits
    assert torch.equal(steps, steps.round()) and steps.abs().max() <= 2 ** (bits + 1)


@pytest.mark.parametrize("dim", [80, 128, 256])
def test_a_product_of_two_heads_is_exact_in_fp64(dim: int) -> None:
    """The worst case: an odd sum of numbers at the end of the grid."""
    bits = grid_bits(dim)
    x = torch.full((dim,), 2 - 2.0**-bits)
    x[-1] = 0.0
    units = Heads.encode(x, "fp32").units().double()
    exact = (dim - 1) * (2 ** (bits + 1) - 1) ** 2
    assert int(float(torch.dot(units, units)) * 2 ** (2 * bits)) == exact


@pytest.mark.parametrize("format", ["e4m3", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_vector_that_is_not_finite_decodes_to_nan(format: Format, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 2] = bad
    heads = Heads.encode(x, format)
    assert (heads.scales == 255).tolist() == [False, True, False]
    assert heads.dequantised()[1].isnan().all() and heads.dequantised()[0].isfinite().all()


def test_zeros_have_the_smallest_scale() -> None:
    for format in ("e4m3", "bf16", "fp32"):
        heads = Heads.encode(torch.zeros(1, 64), format)
        assert torch.equal(heads.dequantised(), torch.zeros(1, 64))
        assert 0 < float(scale_of_byte(heads.scales)) <= 2.0**-60


def test_stack_keeps_both() -> None:
    a, b = (Heads.encode(torch.randn(4, 2, 64), "e4m3") for _ in range(2))
    pair = stack_heads(a, b)
    assert torch.equal(pair.dequantised(), torch.stack([a.dequantised(), b.dequantised()]))
