"""The backward of each operation of the CPU specification against automatic differentiation of its
definition in FP64.

A gradient has no other side whose bits it must share, so a kernel that is a little wrong would
show nowhere else: training would go on, towards something else.  What an operation gives is
compared by itself (the gradient of the input, of each weight), to within a few roundings of the
format that it is in: one that is off by 1% is found.
"""

from collections.abc import Callable

import torch

from isobit.kernels.operands import (
    ExpertGradients,
    LinearInput,
    LinearWeight,
    Operand,
    QkvGradients,
    QkvTransform,
    RopeTable,
)
from isobit.kernels.spec import experts, linear, pointwise, qkv
from isobit.kernels.spec import head as head_module
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.qkv import hadamard
from isobit.kernels.spec.quantise import publish
from isobit.precision.flow import Graph, Site
from isobit.precision.quant_tensor import Format, QuantTensor
from isobit.proof.doctor_findings import require_close

_FP32, _BF16 = 1e-4, 5e-3
"""Of the largest number: sums in another order, and one rounding to BF16 more."""
_TOKENS = 70


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _require(
    what: str,
    found: dict[str, torch.Tensor],
    function: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    dy: torch.Tensor,
    tolerance: float = _FP32,
) -> None:
    """Compare the gradients by name with those of ``function`` of the inputs, in FP64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        y = function(**leaves)
        expected = torch.autograd.grad(y, [leaves[name] for name in found], dy.double())
    for (name, ours), theirs in zip(found.items(), expected, strict=True):
        require_close(f"the gradient of {what} for {name}", ours, theirs, tolerance)


def check_linear(format: Format) -> None:
    """DGrad and WGrad, over the operands as they are quantised."""
    site = Site("doctor", "linear", format, dgrad=format, wgrad=format)
    weight = LinearWeight(site, publish(site, _random(200, 150, seed=1)))
    x, dy = _random(_TOKENS, 150).bfloat16(), _random(_TOKENS, 200, seed=2).bfloat16()
    saved, made = linear.input_saved(x, site), linear.output_gradient(dy, site)
    grad = torch.zeros(200, 150)
    linear.wgrad(made.tokens, saved, grad)
    dx = linear.dgrad(made.rows, weight)
    rows = _plain(made.rows)
    require_close("DGrad", dx, rows.double() @ linear.dequantised(weight).double(), _BF16)
    for what, operand, read in (
        ("dY of DGrad", dy, rows),
        ("dY of WGrad", dy, linear.dequantise_tokens(made.tokens)),
        ("X of WGrad", x, linear.dequantise_tokens(saved)),
    ):  # quantising moves a number by up to a sixteenth, all of them together by next to nothing
        size = (read.double() * operand.double()).sum() / operand.double().square().sum()
        require_close(f"the size of {what}", size[None], torch.ones(1).double(), 2e-3)
    left, right = (linear.dequantise_tokens(one).double() for one in (made.tokens, saved))
    require_close("WGrad", grad, left.t() @ right, _FP32)


def check_rms_norm() -> None:
    """The gradients of the rows, with what the residual stream brings, and of the weight."""
    h, dy, d = (_random(_TOKENS, 301, seed=seed) for seed in range(3))
    weight = _random(301, seed=3)
    grad = torch.zeros(301)
    dh = pointwise.rms_norm_backward(dy, h, weight, 1e-6, d, grad)
    _require(
        "RMSNorm",
        {"its rows": dh - d, "its weight": grad},
        lambda **of: _rms_norm(of["its rows"], of["its weight"]),
        {"its rows": h, "its weight": weight},
        dy,
    )


def check_swiglu() -> None:
    """The gradient of gate and up."""
    gate_up, dy = 2 * _random(_TOKENS, 2 * 301), _random(_TOKENS, 301, seed=1)
    made = pointwise.swiglu_backward(dy, gate_up, Site("doctor", "linear", "fp32")).rows
    assert isinstance(made, torch.Tensor)
    _require("SwiGLU", {"gate_up": made}, _swiglu, {"gate_up": gate_up}, dy)


def check_qkv(is_e4m3: bool) -> None:
    """Through rotation, head norms and bias, and before E4M3 through the Hadamard matrix."""
    table = RopeTable.build(torch.exp(torch.linspace(0.0, -9.0, 16, dtype=torch.float64)), _TOKENS)
    q_norm, k_norm, bias = _random(32, seed=1), _random(32, seed=2), _random(8 * 32, seed=3)
    weights = q_norm, k_norm, bias
    transform = QkvTransform(4, 2, 32, table.cos, table.sin, 1e-6, *weights, hadamard=is_e4m3)
    matrix = hadamard(torch.eye(32)).double() if is_e4m3 else torch.eye(32).double()
    x, positions = _random(_TOKENS, 8 * 32), torch.arange(_TOKENS)
    d = _random(_TOKENS, 8, 32, seed=4)
    grads = QkvGradients(torch.zeros(32), torch.zeros(32), torch.zeros(8 * 32))
    dq, dk, dv = d.split([4, 2, 2], 1)
    dx = qkv.qkv_backward(dq, dk, dv, x, transform, positions, grads)
    assert grads.q_norm is not None
    assert grads.k_norm is not None
    assert grads.bias is not None
    cos, sin = (part.double()[:, None] for part in (table.cos, table.sin))

    def forward(
        x: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (x + bias).view(_TOKENS, 8, 32).split([4, 2, 2], 1)
        turned = torch.cat([_rms_norm(q, q_norm), _rms_norm(k, k_norm)], 1)
        first, second = turned.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        q, k = (turned @ matrix).split([4, 2], 1)
        return torch.cat([q / (32 if is_e4m3 else 1), k, v], 1)

    _require(
        "Q, K and V",
        {"x": dx, "q_norm": grads.q_norm, "k_norm": grads.k_norm, "bias": grads.bias},
        forward,
        {"x": x, "q_norm": q_norm, "k_norm": k_norm, "bias": bias},
        d,
    )


def check_attention() -> None:
    """Of Q, K and V, over two sequences."""
    lengths, heads = (40, 97), (4, 2, 2)
    tokens = sum(lengths)
    graph = Graph((Site("layers.0.attention", "attention", "fp32"),), "fp32")
    attend = PackedAttention(graph, lengths, torch.zeros(tokens, dtype=torch.int64))
    at_rest = QkvTransform(4, 2, 32, torch.ones(1, 16), torch.zeros(1, 16), 1e-6, None, None, None)
    parts = [_random(tokens, n, 32, seed=seed) for seed, n in enumerate(heads)]
    dy = _random(tokens, 4 * 32, seed=5)
    _, attended = attend.attend(0, torch.cat(parts, 1).flatten(1), at_rest)
    made = attend.backward(attended, dy)
    _require(
        "attention",
        dict(zip("qkv", made, strict=True)),
        lambda q, k, v: torch.cat(
            [_attention(*one) for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
        ),
        dict(zip("qkv", parts, strict=True)),
        dy,
    )


def check_embedding() -> None:
    """Of a table that is read more than once."""
    ids, d, grad = torch.arange(_TOKENS) % 23, _random(_TOKENS, 64), torch.zeros(30, 64)
    pointwise.embedding_backward(d, ids, grad)
    _require(
        "the embedding",
        {"table": grad},
        lambda table: table[ids],
        {"table": torch.zeros(30, 64)},
        d,
    )


def check_log_probs() -> None:
    """Of log-probabilities and entropies, for the hidden states and lm_head."""
    hidden, head = _random(_TOKENS, 64), 0.3 * _random(501, 64, seed=1)
    targets, temperatures = torch.arange(_TOKENS) * 7 % 501, torch.full((_TOKENS,), 0.7)
    d, d_entropies = _random(_TOKENS, seed=2), _random(_TOKENS, seed=3)
    grad = torch.zeros_like(head)
    made = head_module.token_log_probs_backward(
        hidden, head, targets, temperatures, d, grad, d_entropies
    )

    def forward(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        log_probs = torch.log_softmax(hidden @ head.t() / 0.7, -1)
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        return torch.stack([chosen, -(log_probs.exp() * log_probs).sum(-1)])

    found = {"hidden": made, "head": grad}
    inputs = {"hidden": hidden, "head": head}
    _require("log-probabilities", found, forward, inputs, torch.stack([d, d_entropies]))


def check_scalar_head() -> None:
    """Of values or scores."""
    hidden, weight, d = _random(_TOKENS, 301), _random(301, seed=1), _random(_TOKENS, seed=2)
    grad = torch.zeros(301)
    made = head_module.scalar_head_backward(hidden, weight, d, grad)
    _require(
        "the scalar head",
        {"hidden": made, "weight": grad},
        lambda hidden, weight: hidden @ weight,
        {"hidden": hidden, "weight": weight},
        d,
    )


def check_experts() -> None:
    """A mixture, for the rows, the matrices and the weights of the routing; and the router."""
    count, width, hidden, top_k = 6, 40, 72, 2
    gate_up, down = (
        _random(count * rows, columns, seed=seed) / columns**0.5
        for seed, rows, columns in ((1, 2 * width, hidden), (2, hidden, width))
    )
    sites = (
        Site("gate_up", "linear", "fp32", parts=(width, width) * count),
        Site("down", "linear", "fp32", parts=(hidden,) * count),
    )
    wide, narrow = (
        LinearWeight(site, publish(site, master))
        for site, master in zip(sites, (gate_up, down), strict=True)
    )
    x, dy = _random(_TOKENS, hidden), _random(_TOKENS, hidden, seed=4)
    router = _random(count, hidden, seed=3)
    routed = experts.route(x, router, top_k, renormalise=True)
    read = linear.linear_input(x, sites[0])
    _, saved = experts.experts_saving(LinearInput(read.read, x), routed, wide, narrow)
    grads = ExpertGradients(torch.zeros_like(gate_up), torch.zeros_like(down))
    dx, d_weights = experts.experts_backward(dy, saved, routed, wide, narrow, grads)
    chosen = routed.experts.long()

    def forward(
        x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows = gate_up.view(count, 2 * width, hidden)[chosen]
        inner = _swiglu(torch.einsum("tkrc,tc->tkr", rows, x))
        out = torch.einsum("tkrc,tkc->tkr", down.view(count, hidden, width)[chosen], inner)
        return (weights[..., None] * out).sum(1)

    _require(
        "the experts",
        {"x": dx, "gate_up": grads.gate_up, "down": grads.down, "weights": d_weights},
        forward,
        {"x": x, "gate_up": gate_up, "down": down, "weights": routed.weights},
        dy,
    )
    grad = torch.zeros_like(router)
    dx = experts.route_backward(d_weights, x, routed, router, True, None, grad)
    _require(
        "the router",
        {"x": dx, "router": grad},
        lambda x, router: (x @ router.t()).gather(1, chosen).softmax(-1),
        {"x": x, "router": router},
        d_weights,
    )


def _plain(x: Operand) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    assert isinstance(x, QuantTensor)
    return linear.dequantise_rows(x)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, one sequence, KV heads shared by neighbouring query heads: [T, H D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
