"""Attention of rollout and of training over the same sequences: decoded token by token over pages,
and packed.

The operations of the CPU specification, one function each: checked for batches and values, on
random numbers over a wide range.

A row is asked for alone, in odd pieces and in reverse order.  What is exact is compared with
integer arithmetic, the rest with FP64 to within a few roundings, so that both sides being wrong in
one way is seen too.  Each returns a result whose bits must not depend on the number of threads.
"""

import math
from dataclasses import dataclass

import torch

from isobit.kernels.operands import LinearWeight, PagedBatch, QkvTransform, RopeTable
from isobit.kernels.spec import experts, head, linear, pointwise, qkv
from isobit.kernels.spec import linear as linear_module
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, PagedAttention, SpecKvCache
from isobit.kernels.spec.qkv import Heads
from isobit.kernels.spec.quantise import publish, quantise_blocks, quantise_rows, snap_rows
from isobit.precision.flow import Graph, PrecisionFlow, Site
from isobit.precision.quant_tensor import BLOCK, Format
from isobit.proof.doctor_findings import (
    Fault,
    RowFunction,
    require_close,
    require_equal,
    rows_alone,
)
from isobit.proof.doctor_quantisers import e4m3_value, splitmix64

_LENGTHS = (1, 40, 67, 130)
_CHUNK = 50  # of the longest sequence, at its start
_TOLERANCES: dict[Format, float] = {
    "e4m3": 1e-3,
    "bf16": 1e-5,
    "fp32": 1e-5,
}  # FP16 or 2^-23 probabilities


_UNCHANGED = QkvTransform(
    4, 2, 32, torch.ones(1, 16), torch.zeros(1, 16), 1e-6, q_norm=None, k_norm=None, bias=None
)
"""No bias, no norms, and the rotation of position 0, where all tokens are said to stand."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_layers: int = 1
    num_kv_heads: int = 2
    head_dim: int = 32


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Q [T, 4, 32], K and V [T, 2, 32] of all sequences, laid end to end."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """As a projection gives them: [T, 8 * 32]."""
        return torch.cat([self.q, self.k, self.v], 1)[index].flatten(1)


@torch.no_grad()
def check_attention(format: Format) -> torch.Tensor:
    """Paged equals packed, packed equals each sequence alone, and both are softmax attention."""
    graph = Graph((Site("layers.0.attention", "attention", format),), "bf16")
    flow = PrecisionFlow("doctor", graph, graph)
    generator = torch.Generator().manual_seed(3)
    tokens = _Tokens(
        *(2 * torch.randn(sum(_LENGTHS), heads, 32, generator=generator) for heads in (4, 2, 2))
    )
    everywhere = torch.arange(sum(_LENGTHS))
    packed = _packed(graph, tokens, _LENGTHS, everywhere)
    require_equal("attention over pages and over a packed batch", _paged(flow, tokens), packed)
    parts = [x.split(_LENGTHS) for x in (tokens.q, tokens.k, tokens.v)]
    alone = [
        _packed(graph, tokens, (length,), index)
        for length, index in zip(_LENGTHS, everywhere.split(_LENGTHS), strict=True)
    ]
    require_equal("attention of sequences alone and together", torch.cat(alone), packed)
    exact = [
        _softmax_attention(*(Heads.encode(x, format).dequantised() for x in part))
        for part in zip(*parts, strict=True)
    ]
    require_close("attention", packed, torch.cat(exact), _TOLERANCES[format])
    return packed


def _packed(
    graph: Graph, tokens: _Tokens, lengths: tuple[int, ...], index: torch.Tensor
) -> torch.Tensor:
    attend = PackedAttention(graph, lengths, torch.zeros_like(index))
    return attend(0, tokens.rows(index), _UNCHANGED).view(-1, 4, 32)


def _paged(flow: PrecisionFlow, tokens: _Tokens) -> torch.Tensor:
    """One token a step for every sequence that is not finished; the longest starts with a chunk.
    Pages lie in reverse order.
    """
    pages = -(-max(_LENGTHS) // PAGE_TOKENS)
    table = torch.arange(len(_LENGTHS) * pages).flip(0).view(-1, pages)
    cache = SpecKvCache(_Shape(), flow, table.numel())
    starts = torch.tensor([0, *_LENGTHS]).cumsum(0)
    done = [0] * len(_LENGTHS)
    output = torch.empty_like(tokens.q)
    while members := [s for s, length in enumerate(_LENGTHS) if done[s] < length]:
        counts = [_CHUNK if done[s] == 0 and _LENGTHS[s] == max(_LENGTHS) else 1 for s in members]
        sequence = torch.tensor(members).repeat_interleave(torch.tensor(counts))
        positions = torch.cat(
            [
                torch.arange(done[s], done[s] + count)
                for s, count in zip(members, counts, strict=True)
            ]
        )
        for s, count in zip(members, counts, strict=True):
            done[s] += count
        slots = table[sequence, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        batch = PagedBatch(tuple(counts), tuple(done[s] for s in members), table[members], slots)
        rows = starts[sequence] + positions
        attend = PagedAttention(cache, batch, torch.zeros_like(rows))
        output[rows] = attend(0, tokens.rows(rows), _UNCHANGED).view(-1, 4, 32)
    return output


def _softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition in FP64: causal, one sequence, KV heads shared by neighbouring query heads."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


_ROWS = 70
_INTEGER = 1 << 9  # every E4M3 number is a multiple of 2^-9


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    """FP32 over a wide range: a normal number times e to the power of another (exp2 would depend on
    the number of threads).
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def check_elementwise() -> torch.Tensor:
    """exp, log and rsqrt of torch: a number's bits wherever it stands in its tensor."""
    x = torch.linspace(-30.0, 3.0, 1003)
    functions: dict[str, tuple[RowFunction, torch.Tensor]] = {
        "exp": (torch.exp, x),
        "log": (torch.log, x.double().exp().float()),
        "rsqrt": (torch.rsqrt, x.double().exp().float()),
        "log in FP64": (torch.log, x.double().exp()),
    }
    results = []
    for name, (function, numbers) in functions.items():
        whole = function(numbers)
        for first in range(1, 18):
            require_equal(
                f"{name} from place {first} and from 0",
                function(numbers[first:].clone()),
                whole[first:],
            )
        alone = torch.cat([function(numbers[i : i + 1].clone()) for i in range(0, 1003, 17)])
        require_equal(f"{name} of a number alone and among others", alone, whole[::17])
        results.append(whole.double())
    require_close(
        "exp",
        results[0],
        torch.tensor([math.exp(value) for value in x.tolist()], dtype=torch.float64),
        1e-6,
    )
    return torch.cat(results)


def check_fp8_gemm_nt() -> torch.Tensor:
    """The exact GEMM over E4M3, against 64-bit integers."""
    b = quantise_blocks(_random(2 * BLOCK, 3 * BLOCK, seed=1))
    x = _random(_ROWS, 3 * BLOCK)
    whole = rows_alone(lambda rows: linear_module.fp8_gemm_nt(quantise_rows(rows), b), x)
    a = quantise_rows(x)
    table = torch.tensor([int(e4m3_value(byte) * _INTEGER) for byte in range(256)])
    left, right = (table[q.values.view(torch.uint8).long()] for q in (a, b))
    expected = torch.zeros_like(whole)
    for k in range(3):
        block = slice(k * BLOCK, (k + 1) * BLOCK)
        products = (left[:, block] @ right[:, block].t()).float() / _INTEGER**2
        expected += products * a.scales[:, k, None] * b.scales[:, k].repeat_interleave(BLOCK)
    require_equal("the GEMM and integer arithmetic", whole, expected)
    return whole


def check_grid_gemm_nt() -> torch.Tensor:
    """The exact GEMM over numbers on the grid."""
    b = snap_rows(_random(150, 200, seed=1).bfloat16())
    x = _random(_ROWS, 200).bfloat16()
    whole = rows_alone(lambda rows: linear_module.grid_gemm_nt(snap_rows(rows), b), x)
    require_close("the GEMM", whole, snap_rows(x).double() @ b.double().t(), 1e-6)
    return whole


def check_linear(format: Format) -> torch.Tensor:
    """Quantise or snap, multiply, round."""
    site = Site("doctor", "linear", format)
    weight = LinearWeight(site, publish(site, _random(2 * BLOCK, BLOCK, seed=1)))
    x = _random(_ROWS, BLOCK).bfloat16()

    def product(rows: torch.Tensor) -> torch.Tensor:
        return linear.linear(linear.linear_input(rows, site).read, weight)

    whole = rows_alone(product, x)
    left = linear.dequantise_rows(quantise_rows(x)) if format == "e4m3" else snap_rows(x).float()
    right = linear.dequantised(weight).double()
    require_close("the linear", whole, left.double() @ right.t(), 5e-3)
    return whole.float()


def check_rms_norm() -> torch.Tensor:
    """RMSNorm over rows wider than one sum."""
    weight = _random(5003, seed=1)
    x = _random(_ROWS, 5003)
    whole = rows_alone(lambda rows: pointwise.rms_norm(rows, weight, 1e-6), x)
    wide = x.double()
    require_close(
        "RMSNorm",
        whole,
        wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(),
        1e-6,
    )
    return whole


def check_rope() -> torch.Tensor:
    """Rotary positions of heads."""
    table = RopeTable.build(torch.exp(torch.linspace(0.0, -9.0, 32, dtype=torch.float64)), _ROWS)
    heads = _random(_ROWS, 3 * 64)
    positions = torch.arange(_ROWS)

    def rotated(rows: torch.Tensor) -> torch.Tensor:  # the last column carries the position
        return qkv.rotate(rows[:, :-1].reshape(-1, 3, 64), table.rows(rows[:, -1].long())).flatten(
            1
        )

    whole = rows_alone(rotated, torch.cat([heads, positions[:, None].float()], 1))
    moved = torch.cat([heads.roll(64, 1), positions[:, None].float()], 1)
    require_equal("the rotation of a head at other places", rotated(moved), whole.roll(64, 1))
    first, second = heads.double().view(_ROWS, 3, 2, 32).unbind(2)
    angles = positions.double()[:, None, None] * torch.exp(
        torch.linspace(0.0, -9.0, 32, dtype=torch.float64)
    )
    expected = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )
    require_close("the rotation", whole, expected.flatten(1), 1e-6)
    return whole


def check_hadamard() -> torch.Tensor:
    """Heads times a Hadamard matrix, whose entry is -1 where i and j share an odd number of
    bits.
    """
    heads = _random(_ROWS, 3 * 64)
    whole = rows_alone(lambda rows: qkv.hadamard(rows.view(-1, 3, 64)).flatten(1), heads)
    signs = [[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    expected = heads.double().view(_ROWS, 3, 64) @ torch.tensor(signs).double()
    require_close("the Hadamard matrix", whole, expected.flatten(1), 1e-6)
    return whole


def check_swiglu() -> torch.Tensor:
    """SwiGLU of an odd width."""
    x = _random(_ROWS, 2 * 301)
    whole = rows_alone(pointwise.swiglu, x)
    gate, up = x.chunk(2, -1)
    for first in range(1, 18):  # each number at other places of its row, and in a row of many
        turned = [part.roll(-first, 1) for part in (gate, up)]
        require_equal(
            f"SwiGLU of columns from {first} on and from 0",
            pointwise.swiglu(torch.cat(turned, 1)),
            whole.roll(-first, 1),
        )
    long = torch.cat([part.flatten().repeat(8)[None] for part in (gate, up)], 1)
    require_equal(
        "SwiGLU of long rows and of short ones",
        pointwise.swiglu(long),
        whole.flatten().repeat(8)[None],
    )
    gate, up = x.double().chunk(2, -1)
    require_close("SwiGLU", whole, gate / (1 + torch.exp(-gate)) * up, 1e-6)
    return whole


def check_route() -> torch.Tensor:
    """The weights of a token's experts."""
    router = _random(24, 301, seed=1).bfloat16()
    x = 0.1 * _random(_ROWS, 301).bfloat16()
    whole = rows_alone(lambda rows: experts.route(rows, router, 5, True).weights, x)
    chosen = (snap_rows(x).double() @ snap_rows(router).double().t()).topk(5).values
    require_close("the router", whole, chosen.softmax(-1), 1e-5)
    return whole


def check_experts() -> torch.Tensor:
    """The experts in E4M3, of sizes that fill no blocks: each a linear with its own matrix."""
    parts = {"gate_up": (72, 72) * 6, "down": (200,) * 6}
    gate_up, down = (
        LinearWeight(site, publish(site, 0.1 * _random(sum(rows), columns, seed=1)))
        for site, rows, columns in (
            (Site("gate_up", "linear", "e4m3", parts=parts["gate_up"]), parts["gate_up"], 200),
            (Site("down", "linear", "e4m3", parts=parts["down"]), parts["down"], 72),
        )
    )
    router, x = _random(6, 200, seed=2).bfloat16(), _random(_ROWS, 200).bfloat16()

    def mixture(rows: torch.Tensor) -> torch.Tensor:
        routed = experts.route(rows, router, 2, True)
        return experts.experts(linear.linear_input(rows, gate_up.site).read, routed, gate_up, down)

    whole, routed = rows_alone(mixture, x), experts.route(x, router, 2, True)
    expected = torch.zeros(_ROWS, 200, dtype=torch.float64)
    for index in range(6):
        (wide, _), (narrow, _) = (experts.one_expert(w, index, 6) for w in (gate_up, down))
        inner = pointwise.swiglu(linear.linear(linear.linear_input(x, wide.site).read, wide))
        out = linear.linear(linear.linear_input(inner, narrow.site).read, narrow)
        share = routed.weights.masked_fill(routed.experts != index, 0.0).sum(1, keepdim=True)
        expected += share.double() * out.double()
    require_close("the sum of the experts", whole, expected, 5e-3)
    return whole.float()


def check_scalar_head() -> torch.Tensor:
    """A value or a score of hidden states wider than one sum."""
    weight = _random(5003, seed=1)
    x = _random(_ROWS, 5003)
    whole = rows_alone(lambda rows: head.scalar_head(rows, weight), x)
    require_close("the scalar head", whole, x.double() @ weight.double(), 1e-6)
    return whole


def check_log_softmax() -> torch.Tensor:
    """Log-probabilities over an odd vocabulary of two sums."""
    x = _random(_ROWS, 5003)
    whole = rows_alone(lambda rows: head.log_softmax(rows, torch.full((len(rows),), 0.7)), x)
    scaled = x.double() / 0.7
    require_close("log-softmax", whole, scaled - scaled.logsumexp(-1, keepdim=True), 1e-6)
    return whole


def check_sampling() -> torch.Tensor:
    """The noise against its generator in plain Python, and the draw."""
    keys = torch.arange(_ROWS) * 0x1234567890ABCDE
    drawn = head.splitmix64(keys[:, None], torch.arange(4)[None])
    if drawn.view(torch.uint64).tolist() != [
        [splitmix64(key, i) for i in range(4)] for key in keys.tolist()
    ]:
        raise Fault("the noise is not what splitmix64 gives in plain Python")
    log_probs = torch.log_softmax(_random(_ROWS, 501), -1)

    def tokens(rows: torch.Tensor) -> torch.Tensor:  # the first column says which row of log_probs
        index = rows[:, 0].long()
        return head.draw(log_probs[index], keys[index], index)

    return rows_alone(tokens, torch.arange(_ROWS)[:, None])
