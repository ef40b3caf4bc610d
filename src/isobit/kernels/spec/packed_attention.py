"""Attention of the training forward: causal within each sequence of a packed batch, over all keys
or those of a sliding window, and differentiable.

The forward encodes Q, K and V in the flow's format and attends over exactly those values, with the
arithmetic of ``isobit.kernels.spec.attention``.  The backward is straight-through: the gradient of
attention over the dequantised Q, K and V, handed to their unquantised sources.  With w = exp(scale
q.k - lse):

    dV = w^T dO      dS = w * (dO V^T - sum(dO * O))      dQ = scale dS K      dK = scale dS^T Q

w is zero where a query does not see a key.  Sequences of similar length are padded into groups; a
padding row repeats the sequence's last token and carries no gradient.
"""

from dataclasses import dataclass
from math import log

import torch

from isobit.kernels.operands import QkvTransform
from isobit.kernels.rope import RopeTable
from isobit.kernels.spec.attention import TILE, KeyTile, attend, first_seen_key
from isobit.kernels.spec.heads import Heads, stack_heads
from isobit.kernels.spec.qkv import transform_qkv
from isobit.kernels.trace import observe_heads, rounded
from isobit.precision.flow import Graph
from isobit.precision.formats import Format

QUERY_BLOCK = 512  # queries of the backward at once: bounds the score matrix of a long sequence
GROUP_TOKENS = 4096  # padded tokens of a group


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences padded to the longest one's length, by descending length."""

    index: torch.Tensor
    """Int64 [B, L]: the packed row of each padded row (the last one, repeated, in the padding)."""
    valid: torch.Tensor  # bool [B, L]
    visible: torch.Tensor  # int64 [B, L]: keys up to a query's own

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Packed [T, ...] -> [B, L, ...]."""
        return x.index_select(0, self.index.view(-1)).view(*self.index.shape, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class Attended:
    """What attention of a layer read and made."""

    encoded: tuple[Heads, Heads, Heads]
    """Q [T, H, D], K and V [T, G, D]."""
    output: torch.Tensor
    """[T, H, D]"""
    log_sum_exps: tuple[torch.Tensor, ...]
    """Of each group, base 2: FP32 [B, G, R, L]."""
    window: int | None


class PackedAttention:
    """Attention for packed sequences of the given lengths (``AttendWithBackward``); the same object
    serves all layers.
    """

    def __init__(self, graph: Graph, lengths: tuple[int, ...], positions: torch.Tensor) -> None:
        """``positions`` int64 [T], from 0 in each sequence."""
        self._formats: list[Format] = [
            site.forward for site in graph.sites if site.kind == "attention"
        ]
        self._groups, self._inverse = _pad(lengths)
        self._positions = positions
        self._rows: RopeTable | None = None

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """[T, (H + 2 G) D] -> [T, H D]."""
        return self.attend(layer, qkv, transform)[0]

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[T, (H + 2 G) D] -> [T, H D], and what the backward reads."""
        if self._rows is None:
            self._rows = RopeTable(transform.cos, transform.sin).rows(self._positions)
        format = self._formats[layer]
        q, k, v = (
            Heads.encode(x, format) for x in transform_qkv(layer, qkv, transform, self._rows)
        )
        observe_heads(layer, q, k, v)
        made = [_attend_group(group, q, k, v, transform.window) for group in self._groups]
        padded = torch.cat([output for output, _ in made])
        wide = padded.index_select(0, self._inverse)
        output = rounded(wide.reshape(qkv.shape[0], -1), qkv.dtype)
        heads = output.view(wide.shape)
        attended = Attended((q, k, v), heads, tuple(lse for _, lse in made), transform.window)
        return output, attended

    def backward(
        self, attended: Attended, d_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [T, H D] -> dq [T, H, D], dk and dv [T, G, D], in its dtype."""
        output = attended.output
        q, k, v = (heads.dequantised() for heads in attended.encoded)
        wide = d_output.view_as(output).float()
        delta = (wide * output.float()).sum(-1)
        padded: list[tuple[torch.Tensor, ...]] = []
        for group, log_sum_exp in zip(self._groups, attended.log_sum_exps, strict=True):
            valid = group.valid[..., None]
            padded.append(
                _group_gradients(
                    group,
                    log_sum_exp,
                    group.gather(q),
                    group.gather(k),
                    group.gather(v),
                    group.gather(wide) * valid[..., None],
                    group.gather(delta) * valid,
                    attended.window,
                )
            )
        dq, dk, dv = (
            torch.cat(parts).index_select(0, self._inverse).to(d_output.dtype)
            for parts in zip(*padded, strict=True)
        )
        return dq, dk, dv


def _pad(lengths: tuple[int, ...]) -> tuple[list[PaddedGroup], torch.Tensor]:
    """The padded groups, and for each packed row its place in the groups laid end to end."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    groups: list[PaddedGroup] = []
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    offset = 0
    while order:
        longest = lengths[order[0]]
        most = max(1, GROUP_TOKENS // longest)
        members = [s for s in order[:most] if lengths[s] * 4 >= longest * 3]
        order = order[len(members) :]
        length = torch.tensor([lengths[s] for s in members])[:, None]
        position = torch.arange(longest)[None, :]
        inside = torch.minimum(position, length - 1)
        group = PaddedGroup(
            torch.tensor([starts[s] for s in members])[:, None] + inside,
            position < length,
            inside + 1,
        )
        inverse[group.index[group.valid]] = (
            offset + torch.arange(group.valid.numel()).view_as(group.valid)[group.valid]
        )
        offset += group.valid.numel()
        groups.append(group)
    return groups, inverse


def _attend_group(
    group: PaddedGroup, queries: Heads, keys: Heads, values: Heads, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output FP32 [B L, H, D] and log-sum-exp (base 2) [B, G, R, L]."""
    batch, length = group.index.shape
    kv_heads = keys.bytes.shape[-1]

    def query_layout(x: torch.Tensor) -> torch.Tensor:  # [T, H, ...] -> [B, G, R, L, ...]
        return (
            group.gather(x)
            .view(batch, length, kv_heads, -1, *x.shape[2:])
            .movedim(1, 3)
            .contiguous()
        )

    def key_layout(x: torch.Tensor) -> torch.Tensor:  # [T, G, ...] -> [B, G, L, ...]
        return group.gather(x).movedim(1, 2)

    pair = stack_heads(keys.map(key_layout), values.map(key_layout))

    def tile_at(j: int, sequences: slice, width: int) -> KeyTile:
        return KeyTile.build(
            pair.map(lambda x: x[:, sequences, :, j * TILE : j * TILE + width].contiguous())
        )

    result = attend(queries.map(query_layout), group.visible, tile_at, window)
    return result.output.movedim(3, 1).reshape(
        batch * length, -1, result.output.shape[-1]
    ), result.log_sum_exp


def _group_gradients(
    group: PaddedGroup,
    log_sum_exp: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_output: torch.Tensor,
    delta: torch.Tensor,
    window: int | None,
) -> tuple[torch.Tensor, ...]:
    """All FP32: q and d_output [B, L, H, D], k and v [B, L, G, D], delta [B, L, H] -> dq, dk, dv as
    [B L, heads, D].  Of each block of queries only the keys that one of them sees are read.
    """
    batch, length, kv_heads, dim = k.shape
    repeat = q.shape[2] // kv_heads
    scale = dim**-0.5
    k, v = (x.transpose(1, 2).reshape(batch * kv_heads, length, dim) for x in (k, v))

    def rows(x: torch.Tensor, block: slice) -> torch.Tensor:  # [B, L, H, ...] -> [B G, R L', ...]
        part = x[:, block].reshape(batch, -1, kv_heads, repeat, *x.shape[3:]).movedim(1, 3)
        return part.reshape(batch * kv_heads, -1, *x.shape[3:])

    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    first_seen = first_seen_key(group.visible, window)
    for first in range(0, length, QUERY_BLOCK):
        block = slice(first, min(first + QUERY_BLOCK, length))
        seen = slice(int(first_seen[:, first].amin()), block.stop)
        q_rows, do_rows = rows(q, block), rows(d_output, block)
        lse = log_sum_exp[..., block].reshape(batch * kv_heads, -1, 1) * log(2.0)
        key = torch.arange(seen.start, seen.stop)
        hidden = key >= group.visible[:, None, block, None]
        if window is not None:
            hidden |= key < first_seen[:, None, block, None]
        scores = torch.bmm(q_rows, k[:, seen].transpose(1, 2)).mul_(scale).sub_(lse)
        weights = (
            scores.view(batch, kv_heads * repeat, -1, key.numel())
            .masked_fill_(hidden, -torch.inf)
            .view_as(scores)
            .exp_()
        )
        dv[:, seen] += torch.bmm(weights.transpose(1, 2), do_rows)
        ds = (
            torch.bmm(do_rows, v[:, seen].transpose(1, 2))
            .sub_(rows(delta, block)[..., None])
            .mul_(weights)
            .mul_(scale)
        )
        dk[:, seen] += torch.bmm(ds.transpose(1, 2), q_rows)
        dq_rows = torch.bmm(ds, k[:, seen]).view(batch, kv_heads, repeat, -1, dim).movedim(3, 1)
        dq[:, block] = dq_rows.reshape(batch, -1, kv_heads * repeat, dim)
    dk, dv = (
        x.view(batch, kv_heads, length, dim).transpose(1, 2).reshape(batch * length, kv_heads, dim)
        for x in (dk, dv)
    )
    return dq.view(batch * length, kv_heads * repeat, dim), dk, dv
