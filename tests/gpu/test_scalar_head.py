"""The head of one output on the GPU: near FP64, the same bits every time, a row in any batch."""

import pytest
import torch

from isobit.kernels.triton.head import scalar_head, scalar_head_backward
from isobit.kernels.triton.pointwise import BLOCKS

WIDTHS = [128, 896, 1024, 2560, 4096, 5120, 12288]  # one to 16 rows at once, padded and not
MANY = 2 * BLOCKS + 77  # several rows a block, in the widest too

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(count: int, width: int) -> Inputs:
    """Hidden states over a wide range, a weight, and the gradients of the outputs."""
    generator = torch.Generator("cuda").manual_seed(count + width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden = (normal(count, 1).exp() * normal(count, width)).bfloat16()
    return hidden, normal(width).bfloat16(), normal(count)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 37, MANY])
def test_against_fp64(count: int, width: int) -> None:
    hidden, weight, d = inputs(count, width)
    start = torch.randn(width, device="cuda")
    grad = start.clone()
    y, d_hidden = scalar_head(hidden, weight), scalar_head_backward(hidden, weight, d, grad)
    assert (y.dtype, d_hidden.dtype) == (torch.float32, torch.bfloat16)
    wide = hidden.double()
    terms = wide * weight.double()
    assert ((y - terms.sum(1)).abs() <= 2.0**-21 * terms.abs().sum(1)).all()
    assert torch.equal(d_hidden, (d[:, None] * weight.float()).bfloat16())
    exact = start.double() + d.double() @ wide
    bound = 2.0**-20 * (start.double().abs() + d.double().abs() @ wide.abs())
    assert ((grad - exact).abs() <= bound).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_it_repeats_its_bits_and_a_row_does_not_depend_on_the_batch(width: int) -> None:
    hidden, weight, d = inputs(MANY, width)
    whole = scalar_head(hidden, weight)

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        grad = torch.zeros(width, device="cuda")
        return scalar_head_backward(hidden, weight, d, grad), grad

    d_hidden, grad = backward()
    for _ in range(3):
        assert torch.equal(scalar_head(hidden, weight), whole)
        assert all(torch.equal(a, b) for a, b in zip(backward(), (d_hidden, grad), strict=True))
    for count in [*range(1, 131), 300]:
        for first in (0, 5, MANY - count):
            part = slice(first, first + count)
            assert torch.equal(scalar_head(hidden[part], weight), whole[part])
    assert torch.equal(scalar_head(hidden.flip(0).contiguous(), weight).flip(0), whole)


def test_gradients_are_added_to() -> None:
    hidden, weight, d = inputs(200, 1024)
    once, before = torch.zeros(1024, device="cuda"), torch.randn(1024, device="cuda")
    added = before.clone()
    scalar_head_backward(hidden, weight, d, once)
    scalar_head_backward(hidden, weight, d, added)
    assert torch.equal(added, before + once)


def test_what_is_not_finite_stays_in_its_row() -> None:
    hidden, weight, _ = inputs(9, 128)
    hidden[4, 7] = torch.nan
    assert scalar_head(hidden, weight).isnan().tolist() == [row == 4 for row in range(9)]


def test_no_rows_change_nothing() -> None:
    hidden, weight, d = inputs(3, 128)
    grad = torch.ones(128, device="cuda")
    assert scalar_head(hidden[:0], weight).shape == (0,)
    assert scalar_head_backward(hidden[:0], weight, d[:0], grad).shape == (0, 128)
    assert (grad == 1).all()
