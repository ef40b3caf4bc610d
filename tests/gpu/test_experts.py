"""Experts on a Hopper GPU: each one's rows are those of a dense linear, whatever the layout, the
library and the other tokens; routing and gradients are the specification's.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from isobit.kernels.backend import backend_of
from isobit.kernels.hopper.grouped_gemm import suits_deep_gemm
from isobit.kernels.operands import ExpertGradients, LinearInput, LinearWeight
from isobit.kernels.routing import RouterLoss, Routing, router_losses, sequence_means
from isobit.kernels.spec import experts as routing_specification
from isobit.kernels.spec import experts as specification
from isobit.kernels.spec import linear as dense_specification
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.experts import one_expert
from isobit.kernels.spec.quantise import publish as publish_on_cpu
from isobit.kernels.triton.dispatch import gather, make_dispatch, most_rows
from isobit.kernels.triton.experts import choose
from isobit.kernels.triton.grouped_gemm import ExpertMatrices
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format, ScaleKind
from isobit.proof.cases import plain_swiglu
from tests.gpu.kernels import (
    DEEP_GEMM_AND_TRITON,
    GPU,
    grouped_gemm_nt,
    linear_input,
    publish,
    swiglu_input,
    swiglu_rows,
)
from tests.kernels.comparison import relative_error

linear, route, route_backward = GPU.linear, GPU.route, GPU.route_backward
experts, experts_saving, experts_backward = (
    GPU.experts,
    GPU.experts_saving,
    GPU.experts_backward,
)


@dataclass(frozen=True)
class Sizes:
    """A layer: hidden size, experts, ranks, and numbers of an expert."""

    hidden: int
    count: int
    top_k: int
    width: int


QWEN3 = Sizes(2048, 128, 8, 768)
SMALL = Sizes(512, 16, 4, 256)
ODD = Sizes(320, 6, 3, 80)  # blocks along both are short
LAYERS = {"qwen3-30b-a3b": QWEN3, "small": SMALL, "odd": ODD}
FORMATS: list[Format] = ["e4m3", "int8", "bf16"]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def site(name: str, parts: tuple[int, ...], format: Format, scales: ScaleKind) -> Site:
    return Site(name, "linear", format, scales, format, format, parts)


@dataclass(frozen=True)
class Layer:
    masters: tuple[torch.Tensor, torch.Tensor]
    gate_up: LinearWeight
    down: LinearWeight

    def on_cpu(self) -> tuple[LinearWeight, LinearWeight]:
        weights = zip((self.gate_up, self.down), self.masters, strict=True)
        gate_up, down = (
            LinearWeight(
                w.site,
                publish_on_cpu(w.site, master.cpu()),
                None if w.bias is None else w.bias.cpu(),
            )
            for w, master in weights
        )
        return gate_up, down


def make(sizes: Sizes, format: Format, scales: ScaleKind = "power_of_two") -> Layer:
    masters = (
        drawn(1, 2 * sizes.count * sizes.width, sizes.hidden) / sizes.hidden**0.5,
        drawn(2, sizes.count * sizes.hidden, sizes.width) / sizes.width**0.5,
    )
    sites = (
        site("gate_up", (sizes.width,) * (2 * sizes.count), format, scales),
        site("down", (sizes.hidden,) * sizes.count, format, scales),
    )
    weights = (LinearWeight(s, publish(s, m)) for s, m in zip(sites, masters, strict=True))
    return Layer(masters, *weights)


def routed(sizes: Sizes, tokens: int) -> Routing:
    """The last expert is idle, the first one popular."""
    logits = drawn(3, tokens, sizes.count)
    logits[:, 0] += 2
    logits[:, -1] = -100
    return choose(logits, sizes.top_k, True)


def with_biases(layer: Layer, sizes: Sizes) -> Layer:
    gate_up = drawn(6, 2 * sizes.count * sizes.width).bfloat16()
    down = drawn(7, sizes.count * sizes.hidden).bfloat16()
    return Layer(
        layer.masters, replace(layer.gate_up, bias=gate_up), replace(layer.down, bias=down)
    )


def part(routing: Routing, rows: slice) -> Routing:
    return Routing(routing.experts[rows], routing.weights[rows], routing.logits[rows])


def to_cpu(routing: Routing) -> Routing:
    return Routing(routing.experts.cpu(), routing.weights.cpu(), routing.logits.cpu())


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layout_and_library_gives_the_bits_of_a_dense_call_an_expert(
    layer: str, format: Format, kind: ScaleKind
) -> None:
    if format != "e4m3" and kind == "fp32":
        pytest.skip("the scales of INT8 are FP32, and BF16 has none")
    sizes = LAYERS[layer]
    made, tokens = make(sizes, format, kind), 200
    routing, x = routed(sizes, tokens), drawn(4, tokens, sizes.hidden).bfloat16()
    read = linear_input(x, made.gate_up.site).read
    expected = []
    for index in range(sizes.count):
        inner = linear(read, one_expert(made.gate_up, index, sizes.count)[0])
        one, _ = one_expert(made.down, index, sizes.count)
        expected.append((inner, linear(swiglu_input(inner, one.site).read, one)))
    chosen, token = routing.experts.long(), torch.arange(tokens, device="cuda")[:, None]
    inner, outer = (torch.stack(each)[chosen, token] for each in zip(*expected, strict=True))
    scales = kind if format == "e4m3" else "int8" if format == "int8" else None
    matrices = [ExpertMatrices.of(w, sizes.count) for w in (made.gate_up, made.down)]
    suits = all(map(suits_deep_gemm, matrices))
    for height in (None, 256):
        dispatch = make_dispatch(routing.experts, sizes.count, height)
        for back_end in DEEP_GEMM_AND_TRITON:
            if height is not None and (back_end == "triton" or not suits):
                continue
            up = grouped_gemm_nt(gather(read, dispatch), matrices[0], dispatch, back_end)
            places = dispatch.places.long()
            assert torch.equal(up[places], inner), (height, back_end)
            rows = swiglu_rows(up, dispatch, scales, pads=False)
            down = grouped_gemm_nt(rows, matrices[1], dispatch, back_end)
            assert torch.equal(down[places], outer), (height, back_end)
    total = torch.zeros(tokens, sizes.hidden, device="cuda")
    for rank in range(sizes.top_k):
        total = total + routing.weights[:, rank, None] * outer[:, rank].float()
    ours = experts(read, routing, made.gate_up, made.down)
    assert torch.equal(ours, total.bfloat16())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_token_does_not_see_the_others(layer: str, format: Format) -> None:
    sizes = LAYERS[layer]
    made, tokens = make(sizes, format), 4096
    routing, x = routed(sizes, tokens), drawn(4, tokens, sizes.hidden).bfloat16()
    whole = experts(linear_input(x, made.gate_up.site).read, routing, made.gate_up, made.down)
    assert whole.isfinite().all()
    for count in (1, 2, 7, 64, 129, 256, 257, 1024, 4096):
        rows = slice(0, count)
        read = linear_input(x[rows], made.gate_up.site).read
        ours = experts(read, part(routing, rows), made.gate_up, made.down)
        assert torch.equal(ours, whole[rows]), count
        saving, _ = experts_saving(
            LinearInput(read, x[rows]), part(routing, rows), made.gate_up, made.down
        )
        assert torch.equal(saving, whole[rows]), count


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_captured_has_the_same_bits(format: Format) -> None:
    sizes, made = SMALL, make(SMALL, format)
    router = drawn(5, sizes.count, sizes.hidden).bfloat16() / 16
    for tokens in (1, 8, 64, 256):
        x = drawn(6, tokens, sizes.hidden).bfloat16()

        def step(x: torch.Tensor = x) -> tuple[torch.Tensor, ...]:
            routing = route(x, router, sizes.top_k, True)
            read = linear_input(x, made.gate_up.site).read
            return experts(read, routing, made.gate_up, made.down), routing.experts

        captured = backend_of(torch.device("cuda")).capture(step)
        for seed in (6, 7):
            x.copy_(drawn(seed, tokens, sizes.hidden))
            outputs = [output.clone() for output in captured.replay()]
            assert all(map(torch.equal, outputs, step()))


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", ["small", "odd"])
def test_values_against_the_specification(layer: str, format: Format, kind: ScaleKind) -> None:
    sizes, tokens = LAYERS[layer], 150
    made, routing = make(sizes, format, kind), routed(sizes, tokens)
    x = drawn(4, tokens, sizes.hidden).bfloat16()
    ours = experts(linear_input(x, made.gate_up.site).read, routing, made.gate_up, made.down)
    cpu = made.on_cpu()
    read = dense_specification.linear_input(x.cpu(), cpu[0].site).read
    theirs = specification.experts(read, to_cpu(routing), *cpu)
    exact = plain_experts(x.double(), routing, routing.weights.double(), *made.masters)
    assert relative_error(ours, exact) < 1.02 * relative_error(theirs, exact)
    assert relative_error(ours, theirs) < 0.01


def plain_experts(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The equations in FP64, expert by expert, over all tokens."""
    count, total = routing.logits.shape[1], torch.zeros_like(x)
    uppers, lowers = gate_up.double().chunk(count), down.double().chunk(count)
    for index, (upper, lower) in enumerate(zip(uppers, lowers, strict=True)):
        weight = (weights * (routing.experts == index)).sum(1, keepdim=True)
        total = total + weight * (plain_swiglu(x @ upper.t()) @ lower.t())
    return total


def test_routing_of_small_integers_is_the_specifications_with_its_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    for count, top_k, hidden in ((128, 8, 2048), (256, 16, 512), (8, 2, 320), (5, 3, 64)):
        x, router = (
            torch.randint(-2, 3, (rows, hidden), generator=generator).bfloat16()
            for rows in (500, count)
        )
        router[1] = router[0]
        for renormalise in (True, False):
            theirs = routing_specification.route(x, router, top_k, renormalise)
            ours = route(x.cuda(), router.cuda(), top_k, renormalise)
            assert torch.equal(ours.logits.cpu(), theirs.logits)
            assert torch.equal(ours.experts.cpu(), theirs.experts)
            assert torch.allclose(ours.weights.cpu(), theirs.weights, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("count", "top_k"), [(128, 8), (60, 4)])
def test_routing_does_not_depend_on_the_batch(count: int, top_k: int) -> None:
    x, router = drawn(1, 4096, 2048).bfloat16(), drawn(2, count, 2048).bfloat16()
    whole = route(x, router, top_k, True)
    exact = x.double() @ router.double().t()
    assert relative_error(whole.logits, exact) < 1e-5
    gaps = exact.sort(-1, descending=True).values[:, : top_k + 1].diff(dim=-1).abs().amin(-1)
    clear = gaps > 1e-3
    chosen = exact.sort(dim=-1, descending=True).indices[:, :top_k]
    assert clear.float().mean() > 0.5 and torch.equal(whole.experts[clear].long(), chosen[clear])
    for tokens in (1, 2, 7, 64, 65, 129, 256, 1024):
        ours = route(x[:tokens], router, top_k, True)
        for mine, all_of_them in zip(
            (ours.logits, ours.experts, ours.weights),
            (whole.logits, whole.experts, whole.weights),
            strict=True,
        ):
            assert torch.equal(mine, all_of_them[:tokens]), tokens


def test_logits_that_are_not_finite_choose_distinct_experts() -> None:
    logits = drawn(1, 100, 64)
    logits[3] = float("nan")
    logits[4, 5] = float("nan")
    logits[5] = float("inf")
    chosen = choose(logits, 8, True)
    assert all(
        len(set(row)) == 8 and 0 <= min(row) <= max(row) < 64 for row in chosen.experts.tolist()
    )
    assert chosen.weights[3:6].isnan().all()
    assert chosen.weights[[0, 1, 2, *range(6, 100)]].isfinite().all()


@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (700, 3, 1), (16384, 128, 8)])
def test_places(tokens: int, count: int, top_k: int) -> None:
    experts_of = choose(drawn(1, tokens, count) * 2, top_k, True).experts
    for height in (None, 256) if tokens <= 256 else (None,):
        dispatch = make_dispatch(experts_of, count, height)
        flat = experts_of.flatten().long()
        counts = flat.bincount(minlength=count)
        assert torch.equal(dispatch.counts.long(), counts)
        groups = (counts + 127) // 128
        starts = functional.pad(groups.cumsum(0), (1, 0))
        assert torch.equal(dispatch.starts.long(), starts)
        first = starts[:-1] * 128 if height is None else torch.arange(count).cuda() * height
        order = flat.sort(stable=True).indices
        before = functional.pad(counts.cumsum(0), (1, 0))[:-1]
        expected = torch.empty_like(flat)
        index = torch.arange(flat.numel(), device="cuda")
        expected[order] = (first - before)[flat[order]] + index
        assert torch.equal(dispatch.places.flatten().long(), expected)
        if dispatch.experts is not None:
            assert dispatch.rows == most_rows(tokens, top_k, count) >= 128 * groups.sum()
            labels = torch.full((dispatch.rows,), -1, device="cuda")
            labels[expected] = flat
            assert torch.equal(dispatch.experts.long(), labels)


def backward(
    layer: Layer, sizes: Sizes, routing: Routing, x: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    """dx, the weights' gradient, and the masters', added to ones."""
    read = LinearInput(linear_input(x, layer.gate_up.site).read, x)
    _, saved = experts_saving(read, routing, layer.gate_up, layer.down)
    grads = ExpertGradients(*(torch.ones_like(master) for master in layer.masters))
    made = experts_backward(dy, saved, routing, layer.gate_up, layer.down, grads)
    return [*made, grads.gate_up, grads.down]


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize("wgrad", ["e4m3", "int8", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", ["small", "odd"])
def test_gradients_are_as_close_to_autograd_as_the_specifications(
    layer: str, format: Format, wgrad: Format, kind: ScaleKind
) -> None:
    if wgrad not in (format, "bf16") or (format != "e4m3" and kind == "fp32"):
        pytest.skip("no flow has it")
    sizes, tokens = LAYERS[layer], 300
    made, routing = make(sizes, format, kind), routed(sizes, tokens)
    made = Layer(
        made.masters,
        *(LinearWeight(replace(w.site, wgrad=wgrad), w.matrix) for w in (made.gate_up, made.down)),
    )
    x, dy = (drawn(seed, tokens, sizes.hidden).bfloat16() for seed in (4, 5))
    ours = backward(made, sizes, routing, x, dy)
    cpu = made.on_cpu()
    read = LinearInput(dense_specification.linear_input(x.cpu(), cpu[0].site).read, x.cpu())
    _, saved = specification.experts_saving(read, to_cpu(routing), *cpu)
    grads = ExpertGradients(*(torch.ones(master.shape) for master in made.masters))
    theirs = specification.experts_backward(dy.cpu(), saved, to_cpu(routing), *cpu, grads)
    theirs = [*theirs, grads.gate_up, grads.down]
    leaves = [
        leaf.double().requires_grad_() for leaf in (x, routing.weights.clone(), *made.masters)
    ]
    y = plain_experts(leaves[0], routing, *leaves[1:])
    exact = list(torch.autograd.grad((y * dy.double()).sum(), leaves))
    for gradient in exact[2:]:
        gradient += 1
    for name, mine, other, best in zip(
        ("x", "weights", "gate_up", "down"), ours, theirs, exact, strict=True
    ):
        assert mine.isfinite().all(), name
        mine, other = relative_error(mine, best), relative_error(other, best)
        assert mine < 1.05 * other + 1e-4, (name, mine, other)
    last = [part.chunk(sizes.count)[-1] for part in ours[2:]]
    assert all((part == 1).all() for part in last)  # nobody went there


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", ["small", "odd"])
def test_biases_and_a_clamped_gate_are_the_specifications(layer: str, format: Format) -> None:
    """Forward, and gradients of x, the weights, the matrices and the biases."""
    sizes, tokens = LAYERS[layer], 300
    made, routing = with_biases(make(sizes, format), sizes), routed(sizes, tokens)
    x, dy = (drawn(seed, tokens, sizes.hidden).bfloat16() for seed in (4, 5))
    results: list[list[torch.Tensor]] = []
    sides: list[tuple[Any, ...]] = [
        (GPU, (made.gate_up, made.down), routing, "cuda"),
        (SpecBackend(), made.on_cpu(), to_cpu(routing), "cpu"),
    ]
    for kernels, weights, chosen, place in sides:
        one_x, one_dy = x.to(place), dy.to(place)
        read = kernels.linear_input(one_x, weights[0].site).read
        y = kernels.experts(read, chosen, *weights, "clamped_silu")
        again, saved = kernels.experts_saving(
            LinearInput(read, one_x), chosen, *weights, "clamped_silu"
        )
        assert torch.equal(y, again)
        shapes = [master.shape for master in made.masters]
        biases = [w.bias.shape for w in weights if w.bias is not None]
        grads = ExpertGradients(*(torch.ones(shape, device=place) for shape in (*shapes, *biases)))
        back = kernels.experts_backward(one_dy, saved, chosen, *weights, grads, "clamped_silu")
        assert grads.gate_up_bias is not None and grads.down_bias is not None
        of_biases = grads.gate_up_bias, grads.down_bias
        results.append([y, *back, grads.gate_up, grads.down, *of_biases])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours.cpu(), theirs) < 0.02
    idle = [part.chunk(sizes.count)[-1] for part in results[0][3:]]
    assert all((part == 1).all() for part in idle)
    few = slice(0, 5)  # a token's output does not depend on the others
    read = linear_input(x[few], made.gate_up.site).read
    alone = experts(read, part(routing, few), made.gate_up, made.down, "clamped_silu")
    assert torch.equal(alone, results[0][0][few])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_repeat_and_are_added_once(layer: str, format: Format) -> None:
    sizes, tokens = LAYERS[layer], 1500
    made, routing = make(sizes, format), routed(sizes, tokens)
    x, dy = (drawn(seed, tokens, sizes.hidden).bfloat16() for seed in (4, 5))
    first = backward(made, sizes, routing, x, dy)
    for _ in range(3):
        assert all(map(torch.equal, first, backward(made, sizes, routing, x, dy)))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(128, 8), (6, 2)])
def test_the_routers_gradient_is_autograds(count: int, top_k: int, renormalise: bool) -> None:
    lengths, hidden = (100, 1, 399), 256
    tokens = sum(lengths)
    x, router = drawn(1, tokens, hidden).bfloat16(), drawn(2, count, hidden).bfloat16() / 16
    routing, d_weights = route(x, router, top_k, renormalise), drawn(3, tokens, top_k)
    loss = RouterLoss(sequence_means(lengths).cuda(), 0.3, 0.2)
    leaves = [leaf.double().requires_grad_() for leaf in (x, router)]
    logits = leaves[0] @ leaves[1].t()
    weights = torch.softmax(logits, -1).gather(1, routing.experts.long())
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    balance, z = router_losses(replace(routing, logits=logits), loss.means.double())
    objective = (weights * d_weights).sum() + (loss.balance * balance + loss.z * z).sum()
    d_x, d_router = torch.autograd.grad(objective, leaves)
    start = drawn(4, count, hidden)
    made = []
    for _ in range(2):
        grad = start.clone()
        dx = route_backward(d_weights, x, routing, router, renormalise, loss, grad)
        made.append((dx, grad))
    assert relative_error(made[0][0], d_x) < 3e-3  # rounded to BF16
    assert relative_error(made[0][1], start.double() + d_router) < 1e-5
    assert all(map(torch.equal, *made))
