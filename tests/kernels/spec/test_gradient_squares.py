"""A sum of squares for every 128 rows: near the exact one, and the same in any slice."""

import math
from fractions import Fraction

import pytest
import torch

from isobit.kernels.spec import gradient_squares as module
from isobit.kernels.spec.gradient_squares import gradient_squares

SHAPES = [(1,), (200,), (128, 1), (300, 70), (512, 64), (5, 9000), (40, 3, 7)]


def gradient(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * torch.exp(8 * torch.randn(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_for_every_128_rows(shape: tuple[int, ...]) -> None:
    grad = gradient(shape)
    made = gradient_squares([grad])
    exact = [sum(Fraction(x) ** 2 for x in some.flatten().tolist()) for some in grad.split(128)]
    assert made == pytest.approx([float(one) for one in exact], rel=1e-13)


def test_tensors_stand_one_behind_the_other_and_one_without_rows_has_none() -> None:
    grads = [gradient(shape) for shape in SHAPES]
    made = gradient_squares([grads[0], torch.empty(0, 8), *grads[1:]])
    assert made == [one for grad in grads for one in gradient_squares([grad])]
    assert gradient_squares([]) == gradient_squares([torch.empty(0)]) == []


@pytest.mark.parametrize("shape", [(1000,), (900, 70), (640, 5000), (257, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_slice_has_the_sums_of_the_whole(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = gradient(shape)
    whole = gradient_squares([grad])
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for cut in range(0, shape[0], 128):
            assert gradient_squares([grad[:cut].clone(), grad[cut:].clone()]) == whole
            assert gradient_squares([grad[cut : cut + 128]]) == [whole[cut // 128]]
        monkeypatch.setattr(module, "_NUMBERS_AT_A_TIME", 1)
        assert gradient_squares([grad]) == whole
    finally:
        torch.set_num_threads(usual)


def test_what_is_not_finite_is_where_it_is_and_nothing_overflows() -> None:
    grad = torch.full((300, 3), 3e38)
    assert all(map(math.isfinite, gradient_squares([grad])))
    assert gradient_squares([torch.full((4,), 2.0**-149)]) == [4 * 2.0**-298]
    grad[130, 1], grad[299, 2] = torch.nan, -torch.inf
    made = gradient_squares([grad])
    assert math.isfinite(made[0]) and math.isnan(made[1]) and made[2] == math.inf
