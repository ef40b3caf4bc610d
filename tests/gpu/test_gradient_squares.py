"""Sums of squares by 128 rows on the GPU: near FP64, repeatable, the same in any slice, and not
finite exactly where a gradient is not.
"""

import math

import pytest
import torch

from isobit.kernels.triton.optimiser import gradient_squares

SHAPES = [(1,), (128,), (1000, 37), (513, 1024), (2050, 2048), (300, 3), (260, 12288)]


def some_gradients() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        10.0 ** (3 - 4 * i) * torch.randn(shape, device="cuda", generator=generator)
        for i, shape in enumerate(SHAPES)
    ]


def test_values_against_fp64() -> None:
    grads = some_gradients()
    exact = [float(some.double().square().sum()) for grad in grads for some in grad.split(128)]
    assert gradient_squares(grads) == pytest.approx(exact, rel=1e-13)


def test_neither_overflow_nor_underflow() -> None:
    (large,) = gradient_squares([torch.full((4,), 3e38, device="cuda")])
    assert math.sqrt(large) == pytest.approx(6e38, rel=1e-6)
    assert gradient_squares([torch.full((4,), 2.0**-149, device="cuda")]) == [4 * 2.0**-298]
    assert gradient_squares([torch.zeros(100, device="cuda")]) == [0.0]


def test_the_same_bits_every_time_and_beside_any_other_tensor() -> None:
    grads = some_gradients()
    first = gradient_squares(grads)
    assert all(gradient_squares(grads) == first for _ in range(5))
    assert [one for grad in grads for one in gradient_squares([grad])] == first
    assert gradient_squares([torch.empty(0, 5, device="cuda"), *grads]) == first
    assert gradient_squares([]) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slice_has_the_sums_of_the_whole(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape, device="cuda")
    whole = gradient_squares([grad])
    for cut in range(0, shape[0], 128):
        assert gradient_squares([grad[:cut], grad[cut:]]) == whole
        assert gradient_squares([grad[cut : cut + 128].clone()]) == [whole[cut // 128]]


def test_the_rows_that_are_not_finite_are_found() -> None:
    grads = [torch.ones(300, 37, device="cuda"), torch.ones(300, device="cuda")]
    grads[0][130, 7], grads[1][299] = torch.nan, -torch.inf
    made = gradient_squares(grads)
    assert [math.isfinite(one) for one in made] == [True, False, True, True, True, False]
