"""The experts of a layer against one dense linear an expert, and their gradients against
autograd.
"""

import pytest
import torch
from torch.nn import functional

from isobit.kernels.operands import ExpertGradients, LinearInput, LinearWeight, Routing
from isobit.kernels.spec.experts import experts, experts_backward, experts_saving, one_expert
from isobit.kernels.spec.linear import linear, linear_input
from isobit.kernels.spec.publish import publish
from isobit.kernels.spec.routing import route
from isobit.kernels.spec.swiglu import swiglu
from isobit.precision.flow import Site
from isobit.precision.formats import Format

TOKENS, HIDDEN, WIDTH, COUNT, TOP_K = 45, 200, 72, 6, 3
IDLE = 4
"""The first expert that no token goes to."""
FORMATS: list[Format] = ["fp32", "bf16", "e4m3"]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(name: str, parts: tuple[int, ...], columns: int, format: Format) -> LinearWeight:
    site = Site(name, "linear", format, "power_of_two", format, format, parts)
    return LinearWeight(site, publish(site, 0.1 * drawn(len(name), sum(parts), columns)))


def make(format: Format) -> tuple[torch.Tensor, Routing, LinearWeight, LinearWeight]:
    """Tokens, of which none goes to the last experts, in a layer whose sizes fill no blocks."""
    x = drawn(0, TOKENS, HIDDEN).to(torch.float32 if format == "fp32" else torch.bfloat16)
    routing = route(x, drawn(1, COUNT, HIDDEN).to(x.dtype), TOP_K, True)
    chosen = (routing.experts[:, :1] + torch.arange(TOP_K).int()) % IDLE
    gate_up = weight("gate_up", (WIDTH, WIDTH) * COUNT, HIDDEN, format)
    return (
        x,
        Routing(chosen, routing.weights, routing.logits),
        gate_up,
        weight("down", (HIDDEN,) * COUNT, WIDTH, format),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_an_expert_is_a_linear(format: Format) -> None:
    """Each token's outputs, by one dense call an expert over all tokens, summed by rank."""
    x, routing, gate_up, down = make(format)
    dense = []
    for index in range(COUNT):
        (up, _), (lower, _) = one_expert(gate_up, index, COUNT), one_expert(down, index, COUNT)
        inner = swiglu(linear(linear_input(x, up.site).read, up))
        dense.append(linear(linear_input(inner, lower.site).read, lower))
    stacked, rows = torch.stack(dense), torch.arange(TOKENS)
    total = torch.zeros(TOKENS, HIDDEN)
    for rank in range(TOP_K):
        chosen = stacked[routing.experts[:, rank].long(), rows].float()
        total = total + routing.weights[:, rank, None] * chosen
    y = experts(linear_input(x, gate_up.site).read, routing, gate_up, down)
    assert torch.equal(y, total.to(x.dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_see_the_others(format: Format) -> None:
    x, routing, gate_up, down = make(format)
    whole = experts(linear_input(x, gate_up.site).read, routing, gate_up, down)
    for rows in (slice(0, 1), slice(9, 10), slice(4, 40)):
        part = Routing(routing.experts[rows], routing.weights[rows], routing.logits[rows])
        read = linear_input(x[rows], gate_up.site).read
        assert torch.equal(experts(read, part, gate_up, down), whole[rows])


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, routing, gate_up, down = make("e4m3")
    clean = experts(linear_input(x, gate_up.site).read, routing, gate_up, down)
    x[7, 3] = torch.inf
    found = experts(linear_input(x, gate_up.site).read, routing, gate_up, down)
    assert not found[7].isfinite().any()
    others = torch.arange(TOKENS) != 7
    assert torch.equal(found[others], clean[others])


def backward(format: Format) -> tuple[list[torch.Tensor], torch.Tensor]:
    """dx, the weights' gradient and the masters', added to ones; and y."""
    x, routing, gate_up, down = make(format)
    read = LinearInput(linear_input(x, gate_up.site).read, x)
    y, saved = experts_saving(read, routing, gate_up, down)
    grads = ExpertGradients(
        torch.ones(2 * COUNT * WIDTH, HIDDEN), torch.ones(COUNT * HIDDEN, WIDTH)
    )
    dy = drawn(5, TOKENS, HIDDEN).to(x.dtype)
    dx, d_weights = experts_backward(dy, saved, routing, gate_up, down, grads)
    return [dx, d_weights, grads.gate_up, grads.down], y


def plain_gradients(format: Format) -> list[torch.Tensor]:
    """Autograd of the plain equations in FP64."""
    x, routing, *_ = make(format)
    leaves = [
        one.double().requires_grad_()
        for one in (
            x,
            routing.weights,
            0.1 * drawn(len("gate_up"), 2 * COUNT * WIDTH, HIDDEN),
            0.1 * drawn(len("down"), COUNT * HIDDEN, WIDTH),
        )
    ]
    up, lower = leaves[2].view(COUNT, 2 * WIDTH, HIDDEN), leaves[3].view(COUNT, HIDDEN, WIDTH)
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for rank in range(TOP_K):
        chosen = routing.experts[:, rank].long()
        gate, linear_up = torch.einsum("tc,tnc->tn", leaves[0], up[chosen]).chunk(2, -1)
        inner = functional.silu(gate) * linear_up
        y = y + leaves[1][:, rank, None] * torch.einsum("ti,tci->tc", inner, lower[chosen])
    dy = drawn(5, TOKENS, HIDDEN).to(x.dtype).double()
    return list(torch.autograd.grad((y * dy).sum(), leaves))


@pytest.mark.parametrize(("format", "error"), [("fp32", 1e-5), ("bf16", 0.02), ("e4m3", 0.12)])
def test_gradients(format: Format, error: float) -> None:
    """Relative to the whole gradient; an E4M3 number has an error of up to 1/16."""
    found, _ = backward(format)
    for one, expected in zip(found, plain_gradients(format), strict=True):
        added = one.double() - (1.0 if one.shape[0] > TOKENS else 0.0)
        assert (added - expected).norm() < error * expected.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_the_backward_repeats_and_leaves_experts_without_tokens_alone(format: Format) -> None:
    (first, y), (second, _) = backward(format), backward(format)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    x, routing, gate_up, down = make(format)
    assert torch.equal(y, experts(linear_input(x, gate_up.site).read, routing, gate_up, down))
    for grad, rows in ((first[2], 2 * WIDTH), (first[3], HIDDEN)):
        assert torch.equal(grad[IDLE * rows :], torch.ones_like(grad[IDLE * rows :]))
        assert not torch.equal(grad[:rows], torch.ones_like(grad[:rows]))
