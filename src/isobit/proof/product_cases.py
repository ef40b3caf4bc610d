"""The cases of ``isobit.proof.cases`` that are products: GEMMs, linears, experts and attention.

Attention has no independent rows, so what it computes for a packed batch is compared with each
sequence alone, and with pages that are filled in chunks, as rollout does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from isobit.kernels.operands import (
    ExpertGradients,
    LinearInput,
    LinearWeight,
    Operand,
    PagedBatch,
    QkvTransform,
    RopeTable,
    Routing,
)
from isobit.kernels.spec import experts as experts_module
from isobit.kernels.spec import linear as linear_module
from isobit.kernels.spec import pointwise
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, PagedAttention, SpecKvCache
from isobit.kernels.spec.qkv import Heads, transform_qkv
from isobit.kernels.spec.quantise import (
    dequantise_int8,
    publish,
    quantise_blocks,
    quantise_int8,
    quantise_rows,
    quantise_tokens,
    snap_rows,
)
from isobit.precision.flow import Graph, PrecisionFlow, Site
from isobit.precision.quant_tensor import (
    BLOCK,
    DTYPES,
    EIGHT_BITS,
    Format,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    rotation_size,
)
from isobit.proof.cases import BF16, FP32, ROWS, Case, normal, plain_swiglu, wide
from isobit.proof.doctor_findings import require_close, require_equal

_INTEGER = 1 << 9  # every E4M3 number is a multiple of 2^-9


def e4m3_gemm(scales: ScaleKind = "power_of_two") -> Case:
    """The exact GEMM over E4M3, against 64-bit integers."""
    x = wide(ROWS, 3 * BLOCK, spread=4.0)
    b = quantise_blocks(wide(2 * BLOCK, 3 * BLOCK, seed=1, spread=4.0), scales)

    def plain() -> Tensor:
        a = quantise_rows(x, scales)
        left, right = (q.values.double().mul(_INTEGER).long().split(BLOCK, 1) for q in (a, b))
        total = torch.zeros(ROWS, 2 * BLOCK)
        for k in range(3):
            products = (left[k] @ right[k].t()).float() / _INTEGER**2
            total += products * a.scales[:, k, None] * b.scales[:, k].repeat_interleave(BLOCK)
        return total

    return Case(
        "the GEMM in E4M3",
        {},
        plain,
        lambda rows: linear_module.fp8_gemm_nt(quantise_rows(x[rows], scales), b),
        tolerance=0.0,
    )


def int8_gemm(columns: int = 3 * BLOCK) -> Case:
    """The exact GEMM over INT8, against 64-bit integers."""
    x = wide(ROWS, columns, spread=4.0)
    made = quantise_int8(wide(150, columns, seed=1, spread=4.0))

    def plain() -> Tensor:
        a = quantise_int8(x)
        sums = a.values.long() @ made.values.long().t()
        return sums.float() * a.scales[:, None] * made.scales

    return Case(
        "the GEMM in INT8",
        {},
        plain,
        lambda rows: linear_module.int8_gemm_nt(quantise_int8(x[rows]), made),
        tolerance=0.0,
    )


def grid_gemm(columns: int = 200, dtype: torch.dtype = BF16) -> Case:
    """The exact GEMM over numbers on the grid."""
    x, b = (wide(n, columns, seed=n, dtype=dtype, spread=4.0) for n in (ROWS, 150))
    b = snap_rows(b)
    return Case(
        "the GEMM on the grid",
        {"x": snap_rows(x), "b": b},
        lambda x, b: x @ b.t(),
        lambda rows: linear_module.grid_gemm_nt(snap_rows(x[rows]), b),
    )


def _linear_weight(
    format: Format, parts: tuple[int, ...], columns: int, scales: ScaleKind = "power_of_two"
) -> LinearWeight:
    site = _linear_site(format, parts, scales)
    return LinearWeight(site, publish(site, wide(sum(parts), columns, seed=1)))


def _linear_site(
    format: Format, parts: tuple[int, ...], scales: ScaleKind = "power_of_two"
) -> Site:
    backward: Format = "e4m3" if format in EIGHT_BITS else format
    return Site("case", "linear", format, scales, backward, backward, parts)


def linear(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """Quantise or snap, multiply, round, over the operands as they are quantised."""
    weight = _linear_weight(format, parts, columns, scales)
    x = wide(tokens, columns, dtype=DTYPES["fp32" if format == "fp32" else "bf16"])
    read, matrix = _as_numbers(x, weight)
    return Case(
        f"linear in {format.upper()}",
        {"x": read},
        lambda x: x @ matrix.to(x.dtype).t(),
        lambda rows: linear_module.linear(
            linear_module.linear_input(x[rows], weight.site).read, weight
        ),
        tokens,
    )


def _as_numbers(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
    """X and W as FProp reads them, [T, K] and [N, K]."""
    matrix = weight.matrix
    if isinstance(matrix, Int8Rows):
        made, size = quantise_int8(x), rotation_size(x.shape[1])
        return dequantise_int8(Int8Rows(made.values, made.scales / size)), dequantise_int8(matrix)
    if isinstance(matrix, QuantTensor):
        read = linear_module.dequantise_rows(quantise_rows(x, weight.site.scales))
        return read, linear_module.dequantised(weight)
    return snap_rows(x), linear_module.dequantised(weight)


def dgrad(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """DGrad, over the operands as they are quantised."""
    weight = _linear_weight(format, parts, columns, scales)
    dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
    dy = normal(tokens, sum(parts), seed=2, dtype=dtype)
    matrix = linear_module.dequantised(weight)

    def gradients() -> dict[str, Tensor]:
        made = linear_module.output_gradient(dy, weight.site).rows
        return {"x": linear_module.dgrad(made, weight)}

    quantised = quantise_rows(dy, scales, parts) if weight.site.dgrad == "e4m3" else None
    return Case(
        f"linear in {format.upper()}",
        {"x": torch.zeros(tokens, columns, dtype=dtype)},
        lambda x: x @ matrix.to(x.dtype).t(),
        gradients=gradients,
        dy=dy if quantised is None else linear_module.dequantise_rows(quantised),
    )


def wgrad(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """WGrad, over the operands as they are quantised."""
    site = _linear_site(format, parts, scales)
    dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
    x, dy = wide(tokens, columns, dtype=dtype), normal(tokens, sum(parts), seed=2, dtype=dtype)

    def as_read(x: Tensor) -> Tensor:
        read: Operand = quantise_tokens(x, scales) if site.wgrad == "e4m3" else x
        return linear_module.dequantise_tokens(read)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(sum(parts), columns)
        made = linear_module.output_gradient(dy, site).tokens
        linear_module.wgrad(made, linear_module.input_saved(x, site), grad)
        return {"weight": grad}

    read = as_read(x)
    return Case(
        f"linear in {format.upper()}",
        {"weight": torch.zeros(sum(parts), columns)},
        lambda weight: read.to(weight.dtype) @ weight.t(),
        gradients=gradients,
        dy=as_read(dy),
    )


def router(renormalise: bool = True, dtype: torch.dtype = BF16) -> Case:
    """The weights of a token's experts, by rank."""
    x, weight = 0.1 * wide(ROWS, 301, dtype=dtype), wide(24, 301, seed=1, dtype=dtype)
    dy = normal(ROWS, 5, seed=2)

    def route(rows: Tensor) -> Routing:
        return experts_module.route(x[rows], weight, 5, renormalise)

    def plain(x: Tensor, router: Tensor) -> Tensor:
        logits = x @ router.t()
        return logits.topk(5)[0].softmax(-1) if renormalise else logits.softmax(-1).topk(5)[0]

    def gradients() -> dict[str, Tensor]:
        grad, routing = torch.zeros(weight.shape), route(torch.arange(ROWS))
        given = dy, x, routing, weight, renormalise, None, grad
        return {"x": experts_module.route_backward(*given), "router": grad}

    return Case(
        "the router",
        {"x": snap_rows(x), "router": snap_rows(weight)},
        plain,
        lambda rows: route(rows).weights,
        tolerance=1e-5,
        gradients=gradients,
        dy=dy,
    )


EXPERTS, IDLE = 6, 4
"""How many experts there are, and the first that no token goes to."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Tokens and the experts of a layer, of sizes that fill no blocks."""

    x: Tensor
    routing: Routing
    gate_up: LinearWeight
    down: LinearWeight
    masters: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, format: Format) -> "Mixture":
        dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
        x = normal(ROWS, 200, dtype=dtype)
        routing = experts_module.route(x, normal(EXPERTS, 200, seed=1, dtype=dtype), 3, True)
        chosen = (routing.experts[:, :1] + torch.arange(3).int()) % IDLE
        masters, made = [], []
        for parts, columns in (((72, 72) * EXPERTS, 200), ((200,) * EXPERTS, 72)):
            masters.append(0.1 * normal(sum(parts), columns, seed=columns))
            site = _linear_site(format, parts)
            made.append(LinearWeight(site, publish(site, masters[-1])))
        routing = Routing(chosen, routing.weights, routing.logits)
        return cls(x, routing, made[0], made[1], (masters[0], masters[1]))

    def rows(self, index: Tensor) -> Tensor:
        """Of these tokens alone."""
        routing = Routing(*(x[index] for x in self._routing()))
        read = linear_module.linear_input(self.x[index], self.gate_up.site).read
        return experts_module.experts(read, routing, self.gate_up, self.down)

    def _routing(self) -> Sequence[Tensor]:
        return self.routing.experts, self.routing.weights, self.routing.logits

    def dense(self) -> Tensor:
        """Every expert as a linear over all tokens, summed by rank."""
        outputs = []
        for index in range(EXPERTS):
            wide, narrow = (
                experts_module.one_expert(weight, index, EXPERTS)[0]
                for weight in (self.gate_up, self.down)
            )
            read = linear_module.linear_input(self.x, wide.site).read
            inner = pointwise.swiglu(linear_module.linear(read, wide))
            read = linear_module.linear_input(inner, narrow.site).read
            outputs.append(linear_module.linear(read, narrow).float())
        stacked, total = torch.stack(outputs, 1), torch.zeros(ROWS, 200)
        for rank, chosen in enumerate(self.routing.experts.long().unbind(1)):
            total += self.routing.weights[:, rank, None] * stacked[torch.arange(ROWS), chosen]
        return total.to(self.x.dtype)

    def backward(self, dy: Tensor) -> dict[str, Tensor]:
        """The gradients by name, those of the matrices added to zeros."""
        read = linear_module.linear_input(self.x, self.gate_up.site).read
        given = LinearInput(read, self.x), self.routing, self.gate_up, self.down
        y, saved = experts_module.experts_saving(*given)
        require_equal("experts that save and that do not", y, self.rows(torch.arange(ROWS)))
        grads = ExpertGradients(*(torch.zeros_like(master) for master in self.masters))
        dx, d_weights = experts_module.experts_backward(dy, saved, *given[1:], grads)
        return {"x": dx, "gate_up": grads.gate_up, "down": grads.down, "weights": d_weights}


def experts(format: Format) -> Case:
    """Each expert is a linear with its own matrix, to the bit."""
    made = Mixture.of(format)
    return Case("the experts", {}, made.dense, made.rows, tolerance=0.0)


def expert_gradients(format: Format = "fp32") -> Case:
    """Of the rows, the matrices and the weights of the routing."""
    made = Mixture.of(format)
    dy = normal(ROWS, 200, seed=5, dtype=made.x.dtype)
    chosen = made.routing.experts.long()

    def plain(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        matrices = gate_up.view(EXPERTS, -1, 200), down.view(EXPERTS, 200, -1)
        y = torch.zeros_like(x)
        for rank, index in enumerate(chosen.unbind(1)):
            inner = plain_swiglu(torch.einsum("trc,tc->tr", matrices[0][index], x))
            out = torch.einsum("trc,tc->tr", matrices[1][index], inner)
            y = y + weights[:, rank, None] * out
        return y

    gate_up, down = made.masters
    return Case(
        "the experts",
        {"x": made.x, "gate_up": gate_up, "down": down, "weights": made.routing.weights},
        plain,
        gradients=lambda: made.backward(dy),
        dy=dy,
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Random sequences, and the ways to attend over them."""

    format: Format
    lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    dtype: torch.dtype = FP32
    outliers: bool = False
    """Whether some queries and channels are much larger than others, and K has a large bias."""
    num_layers: int = 1

    @property
    def flow(self) -> PrecisionFlow:
        graph = Graph((Site("layers.0.attention", "attention", self.format),), "bf16")
        return PrecisionFlow("case", graph, graph)

    @property
    def positions(self) -> Tensor:
        """int64 [T]"""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def transform(self) -> QkvTransform:
        """A rotation alone."""
        frequencies = 0.1 ** torch.arange(self.head_dim // 2, dtype=torch.float64)
        table = RopeTable.build(frequencies, max(self.lengths))
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return QkvTransform(*heads, table.cos, table.sin, 1e-6, None, None, None, self.window)

    def projected(self) -> Tensor:
        """Q, K and V of all tokens, [T, (H + 2 G) D]."""
        h, g, dim = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = (2 * normal(sum(self.lengths), h + 2 * g, dim, seed=3)).split((h, g, g), 1)
        if self.outliers:
            k, v = k + 20 * normal(g, dim, seed=1), v * normal(len(v), 1, 1, seed=2).mul(2).exp()
            q[::17] *= 100
            k[::13, :, 3] *= 50
        return torch.cat([q, k, v], 1).flatten(1).to(self.dtype)

    def packed(self) -> Tensor:
        """As training attends: all sequences in one batch, [T, H D]."""
        attend = PackedAttention(self.flow.training, self.lengths, self.positions)
        return attend(0, self.projected(), self.transform)

    def alone(self) -> Tensor:
        """Each sequence by itself."""
        return torch.cat(
            [
                PackedAttention(self.flow.training, (len(x),), torch.arange(len(x)))(
                    0, x, self.transform
                )
                for x in self.projected().split(self.lengths)
            ]
        )

    def paged(self, seed: int) -> Tensor:
        """As rollout attends: sequences grow in random chunks and in random company, their pages
        shuffled.
        """
        choose, transform, projected = Random(seed), self.transform, self.projected()  # noqa: S311
        pages = -(-max(self.lengths) // PAGE_TOKENS)
        order = choose.sample(range(len(self.lengths) * pages), len(self.lengths) * pages)
        table = torch.tensor(order).view(-1, pages)
        cache = SpecKvCache(self, self.flow, len(order))
        starts, done = torch.tensor([0, *self.lengths]).cumsum(0), [0] * len(self.lengths)
        output = torch.empty(len(projected), self.num_heads * self.head_dim, dtype=self.dtype)
        while unfinished := [s for s, n in enumerate(self.lengths) if done[s] < n]:
            members = choose.sample(unfinished, choose.randint(1, len(unfinished)))
            counts = [
                min(choose.choice([1, 1, choose.randint(1, 40)]), self.lengths[s] - done[s])
                for s in members
            ]
            sequence = torch.tensor(members).repeat_interleave(torch.tensor(counts))
            positions = torch.cat(
                [torch.arange(done[s], done[s] + n) for s, n in zip(members, counts, strict=True)]
            )
            for s, count in zip(members, counts, strict=True):
                done[s] += count
            slots = table[sequence, positions // PAGE_TOKENS] * PAGE_TOKENS
            slots += positions % PAGE_TOKENS
            lengths = tuple(done[s] for s in members)
            batch = PagedBatch(tuple(counts), lengths, table[members], slots)
            rows = starts[sequence] + positions
            output[rows] = PagedAttention(cache, batch, positions)(0, projected[rows], transform)
        return output

    def encoded(self) -> dict[str, Tensor]:
        """Q, K and V as they are read, by name, FP32 [T, heads, D]."""
        transform = self.transform
        table = RopeTable(transform.cos, transform.sin).rows(self.positions)
        parts = transform_qkv(0, self.projected(), transform, table)
        read = (Heads.encode(x, self.format).dequantised() for x in parts)
        return dict(zip("qkv", read, strict=True))

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention of each sequence: causal, KV heads shared by neighbouring query
        heads.
        """
        outputs = []
        for q, k, v in zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True):  # noqa: B020
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
            behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (behind < 0) | (behind >= (self.window or len(q)))
            scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(outputs)

    def case(self) -> Case:
        """The backward; its Q, K and V are those after the rotation."""
        dy = normal(sum(self.lengths), self.num_heads * self.head_dim, seed=5, dtype=self.dtype)

        def gradients() -> dict[str, Tensor]:
            attend = PackedAttention(self.flow.training, self.lengths, self.positions)
            output, attended = attend.attend(0, self.projected(), self.transform)
            require_equal("attention with and without a backward", output, self.packed())
            return dict(zip("qkv", attend.backward(attended, dy), strict=True))

        return Case("attention", self.encoded(), self.plain, gradients=gradients, dy=dy)


_ATTENTION: dict[Format, float] = {"e4m3": 1e-3, "int8": 1e-3, "bf16": 1e-5, "fp32": 1e-5}
"""Tolerances, relative to the largest number: probabilities are FP16 beside 8 bits, else they are
multiples of 2^-23.
"""


def check_attention(attention: Attention) -> Tensor:
    """Raises Fault unless attention over pages, over a packed batch and of each sequence alone have
    the same bits, and are softmax attention.
    """
    packed = attention.packed()
    paged = attention.paged(seed=1)
    require_equal("attention over pages and over a packed batch", paged, packed)
    require_equal("attention of sequences alone and together", attention.alone(), packed)
    tolerance = _ATTENTION[attention.format]
    require_close("attention", packed, attention.case().results(), tolerance)
    return packed
