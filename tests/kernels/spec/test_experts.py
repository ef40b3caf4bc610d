"""The experts of a layer and the router beside the cases of ``test_cases.py``: idle experts, ties,
rows that are not finite, and the losses of the router.
"""

from dataclasses import replace

import pytest
import torch

from isobit.kernels.operands import ExpertGradients, LinearInput
from isobit.kernels.routing import RouterLoss, Routing, router_losses, sequence_means
from isobit.kernels.spec.experts import (
    experts,
    experts_backward,
    experts_saving,
    one_expert,
    route,
    route_backward,
)
from isobit.kernels.spec.linear import linear, linear_input
from isobit.kernels.spec.pointwise import swiglu_input
from isobit.precision.quant_tensor import Format
from isobit.proof.cases import ROWS
from isobit.proof.expert_cases import EXPERTS, IDLE, ExpertsCase
from tests.kernels.comparison import relative_error

FORMATS: list[Format] = ["fp32", "bf16", "e4m3"]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_not_finite_stays_in_its_row() -> None:
    layer, tokens = ExpertsCase.of("e4m3"), torch.arange(ROWS)
    clean = layer.rows(tokens)
    layer.x[7, 3] = torch.inf
    found = layer.rows(tokens)
    assert not found[7].isfinite().any()
    assert torch.equal(found[tokens != 7], clean[tokens != 7])


@pytest.mark.parametrize("format", FORMATS)
def test_the_backward_repeats_and_leaves_experts_without_tokens_alone(format: Format) -> None:
    layer = ExpertsCase.of(format)
    dy = drawn(5, *layer.x.shape).to(layer.x.dtype)
    first, second = layer.backward(dy), layer.backward(dy)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("gate_up", "down"):
        of_expert = first[name].view(EXPERTS, -1)
        assert not of_expert[IDLE:].any()
        assert of_expert[:IDLE].any(1).all()


TOKENS, HIDDEN, COUNT, TOP_K = 37, 200, 11, 3
LENGTHS = (5, 1, 31)


def plain_routing(x: torch.Tensor, router: torch.Tensor, renormalise: bool) -> Routing:
    """The same equations in torch's own operations and the dtype of x."""
    logits = x @ router.t()
    weights, experts = logits.softmax(-1).topk(TOP_K)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights, logits)


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    x = drawn(0, TOKENS, HIDDEN).bfloat16()
    row = drawn(1, 1, HIDDEN).bfloat16()
    router = row.expand(40, HIDDEN)
    assert torch.equal(route(x, router, 4, True).experts, torch.arange(4).expand(TOKENS, 4).int())
    router = torch.cat([row, -row, row, row])
    chosen = torch.tensor([[0, 2, 3], [1, 0, 2]])
    experts = route(torch.cat([row, -row]), router, 3, True).experts
    assert torch.equal(experts.long(), chosen)


@pytest.mark.parametrize("experts", [3, 11, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_the_others(dtype: torch.dtype, experts: int) -> None:
    x, router = drawn(0, 300, HIDDEN).to(dtype), drawn(1, experts, HIDDEN).to(dtype)
    whole = route(x, router, 3, True)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 36), slice(128, 300)):
        part = route(x[rows], router, 3, True)
        for name in ("experts", "weights", "logits"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name


def test_a_row_that_is_not_finite_is_one() -> None:
    x = drawn(0, TOKENS, HIDDEN).bfloat16()
    router = drawn(1, COUNT, HIDDEN).bfloat16()
    clean = route(x, router, TOP_K, True)
    x[4, 9], x[6, 0] = torch.nan, torch.inf
    found = route(x, router, TOP_K, True)
    others = torch.arange(TOKENS) % 2 == 1
    assert found.weights[[4, 6]].isnan().all()
    assert torch.equal(found.weights[others], clean.weights[others])
    assert torch.equal(found.experts[others], clean.experts[others])
    assert 0 <= int(found.experts.min()) <= int(found.experts.max()) < COUNT


@pytest.mark.parametrize("loss", [(0.0, 0.0), (0.7, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_routing(renormalise: bool, loss: tuple[float, float]) -> None:
    """Against autograd in FP64; the share of the choices in the balance is a constant."""
    x, router = drawn(0, TOKENS, HIDDEN), 0.2 * drawn(1, COUNT, HIDDEN)
    d_weights, means = drawn(2, TOKENS, TOP_K), sequence_means(LENGTHS)
    routing = route(x, router, TOP_K, renormalise)
    grad = torch.ones(COUNT, HIDDEN)
    coefficients = RouterLoss(means, *loss) if any(loss) else None
    dx = route_backward(d_weights, x, routing, router, renormalise, coefficients, grad)

    leaves = [one.double().requires_grad_() for one in (x, router)]
    plain = plain_routing(leaves[0], leaves[1], renormalise)
    assert torch.equal(plain.experts, routing.experts.long())
    balance, z = losses_by_sequence(plain)
    total = (plain.weights * d_weights).sum() + loss[0] * balance.sum() + loss[1] * z.sum()
    for found, expected in zip((dx, grad - 1), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)


def test_a_bias_of_the_router_chooses_and_has_its_gradient() -> None:
    x, router, bias = (
        drawn(n, *s) for n, s in enumerate([(TOKENS, HIDDEN), (COUNT, HIDDEN), (COUNT,)])
    )
    router, d_weights = 0.2 * router, drawn(3, TOKENS, TOP_K)
    routing = route(x, router, TOP_K, True, bias)
    grads = torch.zeros(COUNT, HIDDEN), torch.ones(COUNT)
    dx = route_backward(d_weights, x, routing, router, True, None, *grads)
    leaves = [one.double().requires_grad_() for one in (x, router, bias)]
    chosen = (leaves[0] @ leaves[1].t() + leaves[2]).topk(TOP_K)
    assert torch.equal(chosen.indices, routing.experts.long())
    assert not torch.equal(route(x, router, TOP_K, True).experts, routing.experts)
    weights = chosen.values.softmax(-1)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad((weights * d_weights).sum(), leaves)
    for found, one in zip((dx, grads[0], grads[1] - 1), expected, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("format", ["fp32", "bf16", "e4m3", "int8"])
def test_biases_of_experts_are_added_to_their_outputs(format: Format) -> None:
    """An expert is its linears with their biases; gradients of biases are sums of their own."""
    layer = ExpertsCase.of(format)
    gate_up, down = biased = [
        replace(weight, bias=drawn(seed, sum(weight.site.parts)).to(layer.x.dtype))
        for seed, weight in enumerate((layer.gate_up, layer.down))
    ]
    read, routing = linear_input(layer.x, layer.gate_up.site), layer.routing
    given = LinearInput(read.read, layer.x)
    y, saved = experts_saving(given, routing, gate_up, down, "clamped_silu")
    assert torch.equal(y, experts(read.read, routing, gate_up, down, "clamped_silu"))
    expected = torch.zeros(*routing.experts.shape, layer.x.shape[1])
    for index in range(EXPERTS):
        wide, narrow = (one_expert(weight, index, EXPERTS)[0] for weight in biased)
        own = [w.bias.view(EXPERTS, -1)[index] for w in biased if w.bias is not None]
        inner = linear(read.read, wide) + own[0]
        of_all = linear(swiglu_input(inner, narrow.site, gate="clamped_silu").read, narrow)
        expected = torch.where(
            (routing.experts == index)[..., None], (of_all + own[1]).float()[:, None], expected
        )
    total = sum((routing.weights[:, j, None] * expected[:, j] for j in range(3)), torch.zeros(1))
    assert torch.equal(y, total.to(y.dtype))
    sizes = [(sum(w.site.parts), k) for w, k in zip(biased, (200, 72), strict=True)]
    grads = ExpertGradients(
        *(torch.zeros(size) for size in sizes), *(torch.zeros(size[0]) for size in sizes)
    )
    dy = drawn(5, *layer.x.shape).to(layer.x.dtype)
    experts_backward(dy, saved, routing, gate_up, down, grads, "clamped_silu")
    weighted = routing.weights[..., None] * dy.float()[:, None]
    for index in range(EXPERTS):
        own = weighted[routing.experts == index].to(dy.dtype).float().sum(0)
        assert grads.down_bias is not None and grads.gate_up_bias is not None
        torch.testing.assert_close(grads.down_bias.view(EXPERTS, -1)[index], own)
        assert bool(grads.gate_up_bias.view(EXPERTS, -1)[index].any()) is (index < IDLE)


def losses_by_sequence(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The two losses, one sequence after the other, from their definitions."""
    found = []
    for chosen, logits in zip(
        routing.experts.split(LENGTHS), routing.logits.split(LENGTHS), strict=True
    ):
        counts = torch.bincount(chosen.flatten(), minlength=COUNT)
        shares = COUNT * counts / chosen.numel()
        balance = (shares * logits.softmax(-1).mean(0)).sum()
        found.append(torch.stack([balance, logits.logsumexp(-1).square().mean()]))
    balance, z = torch.stack(found).unbind(1)
    return balance, z


def test_losses() -> None:
    x, router = drawn(0, TOKENS, HIDDEN), 0.2 * drawn(1, COUNT, HIDDEN)
    routing = route(x, router, TOP_K, True)
    for found, expected in zip(
        router_losses(routing, sequence_means(LENGTHS)), losses_by_sequence(routing), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_even_routing_has_the_balance_1() -> None:
    experts = torch.arange(COUNT)[:, None].int()
    routing = Routing(experts, torch.ones(COUNT, 1), torch.zeros(COUNT, COUNT))
    balance, z = router_losses(routing, sequence_means((COUNT,)))
    torch.testing.assert_close(balance, torch.ones(1))
    torch.testing.assert_close(z, torch.tensor([COUNT]).log().square())


def gradients(backward: Format, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of experts in INT8 whose DGrad and WGrad are in a format."""
    layer = ExpertsCase.of("int8")
    weights = [
        replace(weight, site=replace(weight.site, dgrad=backward, wgrad=backward))
        for weight in (layer.gate_up, layer.down)
    ]
    return replace(layer, gate_up=weights[0], down=weights[1]).backward(dy)


def test_a_backward_in_int8_is_nearer_than_one_in_e4m3() -> None:
    dy = drawn(5, ROWS, 200).bfloat16()
    exact, int8, e4m3 = (gradients(format, dy) for format in ("bf16", "int8", "e4m3"))
    for name in ("x", "gate_up", "down"):
        error = relative_error(int8[name], exact[name])
        assert error < 0.02
        assert error < relative_error(e4m3[name], exact[name]) / 2


def test_scales_of_an_expert_in_int8_know_no_tokens_of_others() -> None:
    routing, dy = ExpertsCase.of("int8").routing, drawn(5, ROWS, 200).bfloat16()
    clean = gradients("int8", dy)
    for expert in range(IDLE):
        others = ~(routing.experts == expert).any(1)
        spoilt = gradients("int8", torch.where(others[:, None], 1024 * dy, dy))
        for name in ("gate_up", "down"):
            same = (clean[name] == spoilt[name]).view(EXPERTS, -1).all(1)
            assert same.nonzero().flatten().tolist() == [expert, *range(IDLE, EXPERTS)]
