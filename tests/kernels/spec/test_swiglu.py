"""SwiGLU and its explicit backward against FP64 autograd, and as its two linears read them."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from isobit.kernels.spec.linear import linear_input, output_gradient
from isobit.kernels.spec.swiglu import swiglu, swiglu_backward, swiglu_input, swiglu_saved
from isobit.precision.flow import Site
from isobit.precision.formats import Format
from isobit.precision.quant_tensor import QuantTensor


def site(forward: Format, wgrad: Format | None = None) -> Site:
    return Site("w", "linear", forward, dgrad=forward, wgrad=wgrad or forward)


SITES = [site("fp32"), site("bf16"), site("e4m3"), site("e4m3", wgrad="bf16")]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def plain(gate_up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the gradient of gate_up by autograd, in the dtype of the arguments."""
    gate_up = gate_up.detach().requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    y = functional.silu(gate) * up
    return y.detach(), torch.autograd.grad(y, gate_up, dy)[0]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, QuantTensor):
        return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(
            a.scales, b.scales
        )
    return torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    gate_up, dy = (4 * torch.randn(60, 512)).to(dtype), torch.randn(60, 256).to(dtype)
    y, d_gate_up = swiglu(gate_up), swiglu_backward(dy, gate_up, site("bf16")).rows
    assert isinstance(d_gate_up, torch.Tensor) and y.dtype == d_gate_up.dtype == dtype
    exact, yardstick = plain(gate_up.double(), dy.double()), plain(gate_up, dy)
    for ours, wanted, theirs in zip((y, d_gate_up), exact, yardstick, strict=True):
        assert error(ours, wanted) <= 1.5 * error(theirs, wanted) + 1e-7


def test_far_from_zero_it_is_the_line_or_nothing() -> None:
    gate_up = torch.tensor([[300.0, -300.0, 2.0, 2.0]])
    assert swiglu(gate_up).tolist() == [[600.0, 0.0]]
    (d,) = swiglu_backward(torch.ones(1, 2), gate_up, site("fp32")).rows  # type: ignore[misc]
    assert d.tolist() == [2.0, 0.0, 300.0, 0.0]


@pytest.mark.parametrize("where", SITES, ids=lambda s: f"{s.forward}-{s.wgrad}")
def test_operands_are_those_of_the_single_operations(where: Site) -> None:
    dtype = torch.float32 if where.forward == "fp32" else torch.bfloat16
    gate_up, dy = torch.randn(140, 256).to(dtype), torch.randn(140, 128).to(dtype)
    expected = linear_input(swiglu(gate_up), where, save=True)
    made = swiglu_input(gate_up, where, save=True)
    assert same(made.read, expected.read) and same(made.saved, expected.saved)
    assert same(swiglu_saved(gate_up, where), expected.saved)
    assert swiglu_input(gate_up, where).saved is None
    d_gate_up = swiglu_backward(dy, gate_up, site("bf16")).rows
    assert isinstance(d_gate_up, torch.Tensor)
    whole, parts = swiglu_backward(dy, gate_up, where), output_gradient(d_gate_up, where)
    assert same(whole.rows, parts.rows) and same(whole.tokens, parts.tokens)


@pytest.mark.parametrize("width", [128, 320, 5120])
def test_rows_do_not_depend_on_their_place(width: int) -> None:
    x = (torch.randn(70, width) * torch.exp(2 * torch.randn(70, width))).bfloat16()
    whole = swiglu(x)
    for rows in [slice(i, i + n) for i, n in ((0, 1), (1, 1), (3, 2), (10, 7), (33, 37), (69, 1))]:
        assert torch.equal(swiglu(x[rows]), whole[rows])
