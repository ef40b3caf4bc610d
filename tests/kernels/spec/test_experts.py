"""The experts of a layer against one dense linear an expert, and their gradients against
autograd.

Which experts a token goes to: ties, rows that do not see each other, and the gradients.
"""

import pytest
import torch
from torch.nn import functional

from isobit.kernels.operands import (
    ExpertGradients,
    LinearInput,
    LinearWeight,
    RouterLoss,
    Routing,
    router_losses,
    sequence_means,
)
from isobit.kernels.spec.experts import (
    experts,
    experts_backward,
    experts_saving,
    one_expert,
    route,
    route_backward,
)
from isobit.kernels.spec.linear import linear, linear_input
from isobit.kernels.spec.pointwise import swiglu
from isobit.kernels.spec.quantise import publish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format

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


TOKENS_ROUTING, HIDDEN_ROUTING, EXPERTS, TOP_K_ROUTING = 37, 200, 11, 3
LENGTHS = (5, 1, 31)


def plain_routing(x: torch.Tensor, router: torch.Tensor, renormalise: bool) -> Routing:
    """The same equations in torch's own operations and the dtype of x."""
    logits = x @ router.t()
    weights, experts = logits.softmax(-1).topk(TOP_K_ROUTING)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights, logits)


@pytest.mark.parametrize("renormalise", [False, True])
def test_experts_and_weights(renormalise: bool) -> None:
    x, router = (
        drawn(0, TOKENS_ROUTING, HIDDEN_ROUTING).bfloat16(),
        0.2 * drawn(1, EXPERTS, HIDDEN_ROUTING).bfloat16(),
    )
    found = route(x, router, TOP_K_ROUTING, renormalise)
    expected = plain_routing(x.double(), router.double(), renormalise)
    assert torch.equal(found.experts.long(), expected.experts)
    torch.testing.assert_close(found.logits.double(), expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.weights.double(), expected.weights, rtol=1e-5, atol=1e-6)


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    x, row = (
        drawn(0, TOKENS_ROUTING, HIDDEN_ROUTING).bfloat16(),
        drawn(1, 1, HIDDEN_ROUTING).bfloat16(),
    )
    router = row.expand(40, HIDDEN_ROUTING)
    assert torch.equal(
        route(x, router, 4, True).experts, torch.arange(4).expand(TOKENS_ROUTING, 4).int()
    )
    router = torch.cat([row, -row, row, row])
    chosen = torch.tensor([[0, 2, 3], [1, 0, 2]])
    experts = route(torch.cat([row, -row]), router, 3, True).experts
    assert torch.equal(experts.long(), chosen)


@pytest.mark.parametrize("experts", [3, 11, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_the_others(dtype: torch.dtype, experts: int) -> None:
    x, router = drawn(0, 300, HIDDEN_ROUTING).to(dtype), drawn(1, experts, HIDDEN_ROUTING).to(dtype)
    whole = route(x, router, 3, True)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 36), slice(128, 300)):
        part = route(x[rows], router, 3, True)
        for name in ("experts", "weights", "logits"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name


def test_a_row_that_is_not_finite_is_one() -> None:
    x, router = (
        drawn(0, TOKENS_ROUTING, HIDDEN_ROUTING).bfloat16(),
        drawn(1, EXPERTS, HIDDEN_ROUTING).bfloat16(),
    )
    clean = route(x, router, TOP_K_ROUTING, True)
    x[4, 9], x[6, 0] = torch.nan, torch.inf
    found = route(x, router, TOP_K_ROUTING, True)
    others = torch.arange(TOKENS_ROUTING) % 2 == 1
    assert found.weights[[4, 6]].isnan().all()
    assert torch.equal(found.weights[others], clean.weights[others])
    assert torch.equal(found.experts[others], clean.experts[others])
    assert 0 <= int(found.experts.min()) <= int(found.experts.max()) < EXPERTS


@pytest.mark.parametrize("loss", [(0.0, 0.0), (0.7, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_routing(renormalise: bool, loss: tuple[float, float]) -> None:
    """Against autograd in FP64; the share of the choices in the balance is a constant."""
    x, router = drawn(0, TOKENS_ROUTING, HIDDEN_ROUTING), 0.2 * drawn(1, EXPERTS, HIDDEN_ROUTING)
    d_weights, means = drawn(2, TOKENS_ROUTING, TOP_K_ROUTING), sequence_means(LENGTHS)
    routing = route(x, router, TOP_K_ROUTING, renormalise)
    grad = torch.ones(EXPERTS, HIDDEN_ROUTING)
    coefficients = RouterLoss(means, *loss) if any(loss) else None
    dx = route_backward(d_weights, x, routing, router, renormalise, coefficients, grad)

    leaves = [one.double().requires_grad_() for one in (x, router)]
    plain = plain_routing(leaves[0], leaves[1], renormalise)
    assert torch.equal(plain.experts, routing.experts.long())
    balance, z = losses_by_sequence(plain)
    total = (plain.weights * d_weights).sum() + loss[0] * balance.sum() + loss[1] * z.sum()
    for found, expected in zip((dx, grad - 1), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)


def losses_by_sequence(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The two losses, one sequence after the other, from their definitions."""
    found = []
    for chosen, logits in zip(
        routing.experts.split(LENGTHS), routing.logits.split(LENGTHS), strict=True
    ):
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        shares = EXPERTS * counts / chosen.numel()
        balance = (shares * logits.softmax(-1).mean(0)).sum()
        found.append(torch.stack([balance, logits.logsumexp(-1).square().mean()]))
    balance, z = torch.stack(found).unbind(1)
    return balance, z


def test_losses() -> None:
    x, router = drawn(0, TOKENS_ROUTING, HIDDEN_ROUTING), 0.2 * drawn(1, EXPERTS, HIDDEN_ROUTING)
    routing = route(x, router, TOP_K_ROUTING, True)
    for found, expected in zip(
        router_losses(routing, sequence_means(LENGTHS)), losses_by_sequence(routing), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_even_routing_has_the_balance_1() -> None:
    experts = torch.arange(EXPERTS)[:, None].int()
    routing = Routing(experts, torch.ones(EXPERTS, 1), torch.zeros(EXPERTS, EXPERTS))
    balance, z = router_losses(routing, sequence_means((EXPERTS,)))
    torch.testing.assert_close(balance, torch.ones(1))
    torch.testing.assert_close(z, torch.tensor([EXPERTS]).log().square())
