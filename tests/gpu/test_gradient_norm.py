"""The gradient's norm on the GPU: near FP64, repeatable, and not finite exactly where a gradient is
not.
"""

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.kernels.hopper.gradient_norm import gradient_norm, squared_norms

SHAPES = [(1,), (128,), (1000, 37), (513, 1024), (2050, 2048)]


def some_gradients() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        10.0 ** (3 - 4 * i) * torch.randn(shape, device="cuda", generator=generator)
        for i, shape in enumerate(SHAPES)
    ]


def test_values_against_fp64() -> None:
    grads = some_gradients()
    ours = squared_norms(grads)
    assert ours.dtype == torch.float64
    exact = torch.stack([grad.double().square().sum() for grad in grads])
    torch.testing.assert_close(ours, exact, rtol=1e-13, atol=0)
    assert gradient_norm(grads) == pytest.approx(math.sqrt(exact.sum().item()), rel=1e-13)


def test_neither_overflow_nor_underflow() -> None:
    assert gradient_norm([torch.full((4,), 3e38, device="cuda")]) == pytest.approx(6e38, rel=1e-6)
    assert gradient_norm([torch.full((4,), 1e-45, device="cuda")]) == pytest.approx(
        2 * 2.0**-149, rel=1e-12
    )
    assert gradient_norm([torch.zeros(100, device="cuda")]) == 0


def test_the_same_bits_every_time_and_beside_any_other_tensor() -> None:
    grads = some_gradients()
    first = squared_norms(grads)
    assert all(torch.equal(squared_norms(grads), first) for _ in range(5))
    assert torch.equal(torch.cat([squared_norms([grad]) for grad in grads]), first)


def test_the_tensor_that_is_not_finite_is_named() -> None:
    grads = some_gradients()
    grads[1][5], grads[4][2049, 7] = torch.nan, -torch.inf
    assert squared_norms(grads).isfinite().tolist() == [True, False, True, True, False]
    assert not math.isfinite(gradient_norm(grads))
