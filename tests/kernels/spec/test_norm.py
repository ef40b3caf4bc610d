"""The residual stream and RMSNorm: values and the explicit backward against FP64 autograd of the
plain norm, with torch's of the same dtype as the yardstick.
"""

import pytest
import torch
from torch.nn import functional

from isobit.kernels.spec.linear import linear_input
from isobit.kernels.spec.norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    row_sum,
)
from isobit.precision.flow import Site
from isobit.precision.formats import Format
from isobit.precision.quant_tensor import QuantTensor

EPSILON = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def gradients(
    h: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dh and dw by autograd of torch's norm, in the dtype of the arguments."""
    h, weight = h.detach().requires_grad_(), weight.detach().requires_grad_()
    y = functional.rms_norm(h, h.shape[-1:], weight, EPSILON)
    dh, dw = torch.autograd.grad(y, (h, weight), dy)
    return y.detach(), dh, dw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(50, 128), (20, 3, 64)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    h, dy = (3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1])).to(dtype)
    exact = gradients(h.double(), weight.double(), dy.double())
    yardstick = gradients(h, weight, dy)
    dw = torch.zeros(shape[-1])
    dh = rms_norm_backward(dy, h, weight, EPSILON, None, dw)
    y = rms_norm(h, weight, EPSILON)
    assert (y.dtype, dh.dtype) == (dtype, dtype)
    for ours, wanted, theirs in zip((y, dh, dw), exact, yardstick, strict=True):
        assert error(ours, wanted) <= 1.5 * error(theirs, wanted) + 1e-7
    assert error(dw, exact[2]) < 1e-6, "the weight's gradient is FP32 whatever the activations are"


def test_gradients_are_added_to_and_the_residual_stream_is_passed_on() -> None:
    h, dy, d = (torch.randn(30, 128).bfloat16() for _ in range(3))
    weight = torch.randn(128).bfloat16()
    once, twice = torch.zeros(128), torch.zeros(128)
    through = rms_norm_backward(dy, h, weight, EPSILON, None, once)
    for _ in range(2):
        whole = rms_norm_backward(dy, h, weight, EPSILON, d, twice)
        assert torch.equal(whole, d + through)
    assert torch.equal(twice, once + once)


def site(format: Format) -> Site:
    return Site("w", "linear", format, dgrad=format, wgrad=format)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("format", ["e4m3", "bf16"])
def test_addition_norm_and_operand_are_the_single_operations(format: Format, save: bool) -> None:
    h, x = torch.randn(140, 256).bfloat16(), torch.randn(140, 256).bfloat16()
    weight = torch.randn(256).bfloat16()
    made = add_rms_norm(h, x, weight, EPSILON, site(format), save)
    norm = rms_norm(h + x, weight, EPSILON)
    assert torch.equal(made.h, h + x)
    assert made.norm is not None and torch.equal(made.norm, norm)
    expected = linear_input(norm, site(format), save)
    assert made.input is not None and (made.input.saved is not None) == save
    pairs = [(made.input.read, expected.read), (made.input.saved, expected.saved)]
    for ours, theirs in pairs[: 1 + save]:
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]
        else:
            assert isinstance(ours, QuantTensor) and isinstance(theirs, QuantTensor)
            assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
            assert torch.equal(ours.scales, theirs.scales)


def test_nothing_is_added_and_nothing_encoded_where_there_is_nothing() -> None:
    h, weight = torch.randn(4, 128), torch.ones(128)
    made = add_rms_norm(h, None, weight, EPSILON, None)
    assert made.h is h and made.input is None
    assert made.norm is not None and torch.equal(made.norm, rms_norm(h, weight, EPSILON))


@pytest.mark.parametrize("width", [128, 320, 4096, 5120])
def test_rows_do_not_depend_on_their_place(width: int) -> None:
    x = (torch.randn(70, width) * torch.exp(2 * torch.randn(70, width))).bfloat16()
    weight = torch.randn(width)
    norm = rms_norm(x, weight, EPSILON)
    for rows in [slice(i, i + n) for i, n in ((0, 1), (1, 1), (3, 2), (10, 7), (33, 37), (69, 1))]:
        assert torch.equal(rms_norm(x[rows], weight, EPSILON), norm[rows])


def test_row_sum_of_a_wide_row_is_cut_the_same_way_for_any_batch() -> None:
    x = torch.randn(3, 151_936)
    whole = row_sum(x)
    assert all(torch.equal(row_sum(x[i : i + 1]), whole[i : i + 1]) for i in range(3))
    assert error(whole, x.double().sum(-1, keepdim=True)) < 1e-5
