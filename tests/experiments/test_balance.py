"""Ways to balance WGrad's tokens are compared with what the kernels do."""

import pytest
import torch

from experiments.balance import errors
from isobit.kernels.spec.int8_backward import balanced_rows
from isobit.kernels.spec.linear import int8_gemm_nt


def operands(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """dY [256, 64] and X [256, 128] of tokens that differ, a column of X larger in every second."""
    torch.manual_seed(0)
    dy = torch.randn(256, 64) * torch.exp(1.5 * torch.randn(256, 1))
    x = torch.randn(256, 128) * torch.exp(torch.randn(256, 1))
    x[::2, 7] *= factor
    return dy.bfloat16(), x.bfloat16()


def test_amax_is_as_the_kernels_have_it() -> None:
    dy, x = operands(1.0)
    exact = dy.double().t() @ x.double()
    made = int8_gemm_nt(*balanced_rows(dy, x)).double()
    own = float((made - exact).norm() / exact.norm())
    assert errors(dy, x)["amax"][0] == pytest.approx(own, rel=0.2)


def test_an_outlier_costs_ordinary_columns_less_by_the_mean() -> None:
    found = errors(*operands(1e4))
    assert found["mixed"][1] < found["amax"][1] / 3
    assert found["amax"][0] < found["none"][0] / 3, "and balancing is worth it"


def test_a_token_without_a_gradient_adds_nothing() -> None:
    dy, x = operands(1.0)
    dy[5] = 0
    x[5] = 1e6
    assert all(error < 0.05 for way, (error, _) in errors(dy, x).items() if way != "none")
