"""Attention of rollout and of training over the same sequences: decoded token by token over pages,
and packed.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import PagedBatch, QkvTransform
from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.kv_cache import PAGE_TOKENS, SpecKvCache
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.kernels.spec.paged_attention import PagedAttention
from isobit.precision.flow import Graph, PrecisionFlow, Site
from isobit.precision.formats import Format
from isobit.proof.doctor.bits import require_close, require_equal

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
