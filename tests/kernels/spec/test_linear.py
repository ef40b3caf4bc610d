"""The linear layer's three GEMMs in each format."""

import pytest
import torch

from isobit.kernels.spec.linear import LinearWeight, linear, linear_forward
from isobit.precision.flow import Site
from isobit.precision.formats import Format, ScaleKind
from isobit.precision.quant_tensor import QuantTensor


def make(
    forward: Format, scales: ScaleKind = "power_of_two", wgrad: Format | None = None
) -> tuple[torch.nn.Parameter, LinearWeight]:
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(384, 256))
    return master, LinearWeight.publish(
        Site("w", "linear", forward, scales, dgrad=forward, wgrad=wgrad or forward), master
    )


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = (
        a.double(),
        b.double(),
    )  # torch's cosine_similarity has an epsilon that swallows gradients of 1e-12
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_fp8_gradients_against_the_exact_backward_of_the_same_forward(
    scales: ScaleKind, size: float
) -> None:
    master, weight = make("e4m3", scales)
    x = torch.randn(300, 256).bfloat16().requires_grad_()
    dy = (torch.randn(300, 384) * size).bfloat16()
    linear(x, weight, master).backward(dy)
    assert x.grad is not None and master.grad is not None
    assert cosine(x.grad, dy.double() @ weight.dequantised().double()) >= 0.9985
    assert cosine(master.grad, dy.double().t() @ x.detach().double()) >= 0.9985
    assert not torch.equal(master.grad, dy.float().t() @ x.detach().float()), (
        "WGrad did not quantise its operands"
    )


@pytest.mark.parametrize("forward", ["bf16", "fp32"])
def test_unquantised_gradients_equal_autograd(forward: Format) -> None:
    master, weight = make(forward)
    dtype = torch.float32 if forward == "fp32" else torch.bfloat16
    x = torch.randn(50, 256).to(dtype).requires_grad_()
    dy = torch.randn(50, 384).to(dtype)
    linear(x, weight, master).backward(dy)
    assert x.grad is not None and master.grad is not None
    torch.testing.assert_close(
        x.grad.float(),
        (dy.double() @ weight.dequantised().double()).to(dtype).float(),
        rtol=2e-2,
        atol=1e-4,
    )
    torch.testing.assert_close(
        master.grad, (dy.double().t() @ x.detach().double()).float(), rtol=1e-4, atol=1e-4
    )


def test_wgrad_may_stay_in_bf16_with_the_same_forward() -> None:
    master, weight = make("e4m3", wgrad="bf16")
    x, dy = torch.randn(200, 256).bfloat16(), torch.randn(200, 384).bfloat16()
    y = linear(x, weight, master)
    y.backward(dy)
    assert master.grad is not None
    assert torch.equal(y, linear_forward(x, make("e4m3")[1]))
    assert torch.equal(master.grad, dy.float().t() @ x.float())


def test_bias_is_added_before_the_rounding_and_gets_its_gradient() -> None:
    master = torch.nn.Parameter(torch.randn(128, 128))
    bias = torch.nn.Parameter(torch.randn(128))
    site = Site("w", "linear", "bf16", dgrad="bf16", wgrad="bf16")
    weight = LinearWeight.publish(site, master, bias)
    x = torch.randn(7, 128).bfloat16()
    y = linear(x, weight, master, bias)
    exact = x.double() @ weight.dequantised().double().t() + bias.detach().bfloat16().double()
    assert torch.equal(y, exact.float().bfloat16())
    y.float().sum().backward()
    assert torch.equal(bias.grad, torch.full((128,), 7.0))  # type: ignore[arg-type]


def test_publishing_again_overwrites_in_place() -> None:
    master, weight = make("e4m3")
    assert isinstance(weight.matrix, QuantTensor)
    place = weight.matrix.values.data_ptr()
    newer = LinearWeight.publish(weight.site, master * 2)
    weight.overwrite(master * 2)
    assert weight.matrix.values.data_ptr() == place
    assert torch.equal(weight.dequantised(), newer.dequantised())
