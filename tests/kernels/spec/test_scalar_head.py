"""The head of one output: values and the explicit backward against FP64, with torch's product of
the same dtype as the yardstick, and a row's bits in every batch.
"""

import pytest
import torch

from isobit.kernels.spec.scalar_head import scalar_head, scalar_head_backward

DTYPES = [torch.float32, torch.bfloat16]


def inputs(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states over a wide range, and a weight."""
    sizes = torch.exp(2 * torch.randn(count, 1))
    return (sizes * torch.randn(count, width)).to(dtype), torch.randn(width).to(dtype)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, d_hidden and dw by autograd of torch's product, in the dtype of the arguments."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    y = hidden @ weight
    d_hidden, dw = torch.autograd.grad(y, (hidden, weight), d.to(y.dtype))
    return y.detach(), d_hidden, dw


def error(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """Root mean square, in parts of the sum of the terms' sizes: what cancels in a sum makes no
    error larger, and no row counts more than another.
    """
    return float(((ours.double() - exact) / size).square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 320, 5120])
def test_values_and_gradients(width: int, dtype: torch.dtype) -> None:
    (hidden, weight), d = inputs(50, width, dtype), torch.randn(50)
    exact = plain(hidden.double(), weight.double(), d)
    sizes = plain(hidden.double().abs(), weight.double().abs(), d.abs())
    yardstick = plain(hidden, weight, d)
    dw = torch.zeros(width)
    y, d_hidden = scalar_head(hidden, weight), scalar_head_backward(hidden, weight, d, dw)
    assert (y.dtype, d_hidden.dtype) == (torch.float32, dtype)
    errors: list[float] = []
    for ours, wanted, size, theirs in zip((y, d_hidden, dw), exact, sizes, yardstick, strict=True):
        assert ours.shape == wanted.shape
        errors.append(error(ours, wanted, size))
        assert errors[-1] <= 1.5 * error(theirs, wanted, size)
    assert max(errors[0], errors[2]) < 2e-7, "sums are FP32 whatever goes in"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 4096, 5120])
def test_a_row_does_not_depend_on_its_batch(width: int, dtype: torch.dtype, threads: int) -> None:
    hidden, weight = inputs(130, width, dtype)
    whole, d = scalar_head(hidden, weight), torch.randn(130)
    d_hidden = scalar_head_backward(hidden, weight, d, torch.zeros(width))
    torch.set_num_threads(threads)
    for count in range(1, 131):
        for first in {0, (130 - count) // 2, 130 - count}:
            part = slice(first, first + count)
            assert torch.equal(scalar_head(hidden[part].clone(), weight), whole[part])
    reverse = scalar_head(hidden.flip(0).contiguous(), weight)
    assert torch.equal(reverse.flip(0), whole)
    alone = scalar_head_backward(hidden[3:4], weight, d[3:4], torch.zeros(width))
    assert torch.equal(alone, d_hidden[3:4])


def test_gradients_are_added_as_one_sum_and_repeat_their_bits() -> None:
    (hidden, weight), d = inputs(70, 256, torch.bfloat16), torch.randn(70)
    once, before = torch.zeros(256), torch.randn(256)
    added = before.clone()
    first = scalar_head_backward(hidden, weight, d, once)
    again = scalar_head_backward(hidden, weight, d, added)
    assert torch.equal(first, again) and torch.equal(added, before + once)


def test_what_is_not_finite_stays_in_its_row() -> None:
    hidden, weight = inputs(9, 128, torch.bfloat16)
    hidden[4, 7] = torch.nan
    assert scalar_head(hidden, weight).isnan().tolist() == [row == 4 for row in range(9)]


def test_no_rows() -> None:
    nothing, weight, grad = torch.empty(0, 128), torch.randn(128), torch.zeros(128)
    assert scalar_head(nothing, weight).shape == (0,)
    assert scalar_head_backward(nothing, weight, torch.empty(0), grad).shape == (0, 128)
    assert not grad.any()
