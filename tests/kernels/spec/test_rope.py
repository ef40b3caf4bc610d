"""Rotation of the halves of each head."""

import pytest
import torch

from isobit.kernels.rope import RopeTable
from isobit.kernels.spec.rope import rotate

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
TABLE = RopeTable.build(FREQUENCIES, 50)


def test_values_against_complex_numbers() -> None:
    x, positions = torch.randn(3, 2, 8), torch.tensor([0, 3, 49])
    y = rotate(x, TABLE.rows(positions))
    turn = torch.polar(torch.ones(3, 1, 4).double(), positions[:, None, None] * FREQUENCIES)
    exact = torch.complex(*x.double().chunk(2, -1)) * turn
    torch.testing.assert_close(y.double(), torch.cat([exact.real, exact.imag], -1))
    assert torch.equal(y[0], x[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_table_gives_the_gradient_and_takes_a_rotation_back(
    dtype: torch.dtype,
) -> None:
    rows = TABLE.rows(torch.tensor([0, 3, 49]))
    x, dy = torch.randn(3, 2, 8).to(dtype).requires_grad_(), torch.randn(3, 2, 8).to(dtype)
    (dx,) = torch.autograd.grad(rotate(x, rows), x, dy.float())
    ours = rotate(dy, rows.backward()).to(dtype)
    torch.testing.assert_close(ours, dx, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    back = rotate(rotate(x.detach(), rows), rows.backward())
    torch.testing.assert_close(
        back.to(dtype), x.detach(), rtol=0, atol=0.05 if dtype != torch.float32 else 1e-6
    )
