"""Embedding, RMSNorm and SwiGLU beside the cases of ``test_cases.py``: the order of sums, and fused
operations that must have the bits of the single ones.
"""

import pytest
import torch

from isobit.kernels.operands import Gate
from isobit.kernels.spec.linear import linear_input, output_gradient
from isobit.kernels.spec.pointwise import (
    add_rms_norm,
    embedding_backward,
    rms_norm,
    row_sum,
    swiglu,
    swiglu_backward,
    swiglu_input,
    swiglu_saved,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format
from tests.kernels.comparison import relative_error, same


def test_rows_of_equal_ids_are_added_in_the_order_of_their_tokens() -> None:
    """1e8 + 1 - 1e8 is 0 in FP32, and 1e8 - 1e8 + 1 is 1."""
    grad = torch.zeros(2, 1)
    embedding_backward(torch.tensor([[1e8], [1.0], [-1e8]]), torch.tensor([1, 1, 1]), grad)
    assert grad.tolist() == [[0.0], [0.0]]
    embedding_backward(torch.tensor([[1e8], [-1e8], [1.0]]), torch.tensor([1, 1, 1]), grad)
    assert grad.tolist() == [[0.0], [1.0]]


EPSILON = 1e-6


def site(forward: Format, wgrad: Format | None = None) -> Site:
    return Site("w", "linear", forward, dgrad=forward, wgrad=wgrad or forward)


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
    assert same(made.input.read, expected.read) and same(made.input.saved, expected.saved)


def test_nothing_is_added_and_nothing_encoded_where_there_is_nothing() -> None:
    h, weight = torch.randn(4, 128), torch.ones(128)
    made = add_rms_norm(h, None, weight, EPSILON, None)
    assert made.h is h and made.input is None
    assert made.norm is not None and torch.equal(made.norm, rms_norm(h, weight, EPSILON))


def test_row_sum_of_a_wide_row_is_cut_the_same_way_for_any_batch() -> None:
    x = torch.randn(3, 151_936)
    whole = row_sum(x)
    assert all(torch.equal(row_sum(x[i : i + 1]), whole[i : i + 1]) for i in range(3))
    assert relative_error(whole, x.double().sum(-1, keepdim=True)) < 1e-5


SITES = [site("fp32"), site("bf16"), site("e4m3"), site("e4m3", wgrad="bf16")]


def test_far_from_zero_it_is_the_line_or_nothing() -> None:
    gate_up = torch.tensor([[300.0, -300.0, 2.0, 2.0]])
    assert swiglu(gate_up).tolist() == [[600.0, 0.0]]
    (d,) = swiglu_backward(torch.ones(1, 2), gate_up, site("fp32")).rows  # type: ignore[misc]
    assert d.tolist() == [2.0, 0.0, 300.0, 0.0]


def test_geglu_is_gelu_by_tanh_and_its_gradient_that_of_autograd() -> None:
    """Against FP64, from where it is nothing to where it is the line."""
    gate = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([-3e4, -60.0, 60.0, 3e4])])
    gate_up, dy = torch.cat([gate, torch.randn(len(gate))])[None], torch.randn(1, len(gate))
    exact = gate_up.double().requires_grad_()
    g, up = exact.chunk(2, -1)
    expected = torch.nn.functional.gelu(g, approximate="tanh") * up
    expected.backward(dy.double())
    ours = swiglu(gate_up, "gelu_tanh").double()
    torch.testing.assert_close(ours, expected.detach(), atol=1e-6, rtol=1e-6)
    d = swiglu_backward(dy, gate_up, site("fp32"), "gelu_tanh").rows
    assert isinstance(d, torch.Tensor) and exact.grad is not None
    torch.testing.assert_close(d.double(), exact.grad, atol=2e-6, rtol=2e-6)


def test_clamped_swiglu_is_that_of_gpt_oss_and_its_gradient_that_of_autograd() -> None:
    """Against FP64; at the limit itself there is a gradient, beyond it none."""
    gate = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([-3e4, -7.0, 7.0, 3e4])])
    up = torch.cat([8 * torch.randn(1001), torch.tensor([7.0, -7.0, 7.0, -3e4])])
    gate_up, dy = torch.cat([gate, up])[None], torch.randn(1, len(gate))
    exact = gate_up.double().requires_grad_()
    g, u = exact.chunk(2, -1)
    g, u = g.clamp(max=7), u.clamp(-7, 7)
    expected = g * torch.sigmoid(1.702 * g) * (u + 1)
    expected.backward(dy.double())
    ours = swiglu(gate_up, "clamped_silu").double()
    torch.testing.assert_close(ours, expected.detach(), atol=1e-6, rtol=1e-6)
    d = swiglu_backward(dy, gate_up, site("fp32"), "clamped_silu").rows
    assert isinstance(d, torch.Tensor) and exact.grad is not None
    torch.testing.assert_close(d.double(), exact.grad, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("gate", ["gelu_tanh", "clamped_silu"])
def test_a_gate_of_a_row_has_its_bits_at_any_place(gate: Gate) -> None:
    gate_up, dy = 5 * torch.randn(9, 2 * 77).bfloat16(), torch.randn(9, 77).bfloat16()
    d = swiglu_backward(dy, gate_up, site("bf16"), gate).rows
    assert isinstance(d, torch.Tensor)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(swiglu(gate_up[one], gate), swiglu(gate_up, gate)[one])
        alone = swiglu_backward(dy[one], gate_up[one], site("bf16"), gate).rows
        assert isinstance(alone, torch.Tensor) and torch.equal(alone, d[one])


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_silu"])
@pytest.mark.parametrize("where", SITES, ids=lambda s: f"{s.forward}-{s.wgrad}")
def test_operands_are_those_of_the_single_operations(where: Site, gate: Gate) -> None:
    dtype = torch.float32 if where.forward == "fp32" else torch.bfloat16
    gate_up, dy = torch.randn(140, 256).to(dtype), torch.randn(140, 128).to(dtype)
    expected = linear_input(swiglu(gate_up, gate), where, save=True)
    made = swiglu_input(gate_up, where, True, gate)
    assert same(made.read, expected.read) and same(made.saved, expected.saved)
    assert same(swiglu_saved(gate_up, where, gate), expected.saved)
    assert swiglu_input(gate_up, where).saved is None
    d_gate_up = swiglu_backward(dy, gate_up, site("bf16"), gate).rows
    assert isinstance(d_gate_up, torch.Tensor)
    whole, parts = swiglu_backward(dy, gate_up, where, gate), output_gradient(d_gate_up, where)
    assert same(whole.rows, parts.rows) and same(whole.tokens, parts.tokens)
