"""Ordered sums on the GPU have the bits of one addition after the other."""

import pytest
import torch

from isobit.kernels.spec import optimiser
from isobit.kernels.triton.optimiser import add_in_order


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 128 * 4096 + 16, 3 * 128 * 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 17])
def test_the_bits_of_separate_additions(size: int, count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(size + count)
    numbers = torch.randn((count + 1, size), device="cuda", generator=generator)
    numbers *= torch.exp(8 * torch.randn(numbers.shape, device="cuda", generator=generator))
    total, expected = numbers[0].clone(), numbers[0].clone()
    add_in_order(total, list(numbers[1:]))
    optimiser.add_in_order(expected, list(numbers[1:]))
    assert torch.equal(total, expected)


def test_slices_that_begin_anywhere() -> None:
    numbers = torch.randn(3, 1003, device="cuda")
    total, expected = numbers[0, 1:1001].clone(), numbers[0, 1:1001].clone()
    addends = [numbers[1, 3:1003], numbers[2, 2:1002]]
    add_in_order(total, addends)
    optimiser.add_in_order(expected, addends)
    assert torch.equal(total, expected)
