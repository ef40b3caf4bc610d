"""The cases of ``isobit.proof.cases`` about attention.

Attention has no independent rows, so what it computes for a packed batch is compared with each
sequence alone, and with pages that are filled in chunks, as rollout does.
"""

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from isobit.kernels.operands import (
    DeltaShape,
    PagedBatch,
    QkvTransform,
    RopeTable,
)
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, PagedAttention, SpecKvCache
from isobit.kernels.spec.qkv import Heads, transform_qkv
from isobit.precision.flow import Graph, PrecisionFlow, Site
from isobit.precision.quant_tensor import (
    Format,
)
from isobit.proof.cases import FP32, Case, normal
from isobit.proof.doctor_findings import require_close, require_equal


@dataclass(frozen=True, slots=True)
class AttentionCase:
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
    delta: DeltaShape | None = None
    delta_layers: tuple[int, ...] = ()
    sinks: Tensor | None = None

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
        made = QkvTransform(*heads, table.cos, table.sin, 1e-6, None, None, None, self.window)
        return replace(made, sinks=self.sinks)

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
        """Attention as in training: all sequences in one batch, [T, H D]."""
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
        """Attention as in rollout: sequences grow in random chunks and in random company, their
        pages shuffled.
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
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                last = self.sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)
                scores = torch.cat([scores, last], -1)
            weights = scores.softmax(-1)[..., : len(q)]
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


def check_attention(attention: AttentionCase) -> Tensor:
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
