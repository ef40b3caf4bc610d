"""Attention of the training forward: causal within each sequence of a packed batch, and
differentiable.

The forward encodes Q, K and V in the flow's format and attends over exactly those values, with the
arithmetic of ``isobit.kernels.spec.attention``.  The backward is straight-through: the gradient of
attention over the dequantised Q, K and V, handed to their unquantised sources.  With w = exp(scale
q.k - lse):

    dV = w^T dO      dS = w * (dO V^T - sum(dO * O))      dQ = scale dS K      dK = scale dS^T Q

Sequences of similar length are padded into groups; a padding row repeats the sequence's last token
and carries no gradient.
"""

from dataclasses import dataclass
from math import log
from typing import Any

import torch

from isobit.kernels.spec.attention import TILE, KeyTile, attend
from isobit.kernels.spec.heads import Heads, stack_heads
from isobit.kernels.trace import observe_heads
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import Format

_QUERY_BLOCK = 512  # queries of the backward at once: bounds the score matrix of a long sequence
_GROUP_TOKENS = 4096  # padded tokens of a group


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences padded to the longest one's length, by descending length."""

    index: torch.Tensor
    """Int64 [B, L]: the packed row of each padded row (the last one, repeated, in the padding)."""
    valid: torch.Tensor  # bool [B, L]
    visible: torch.Tensor  # int64 [B, L]: keys a query sees

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Packed [T, ...] -> [B, L, ...]."""
        return x.index_select(0, self.index.view(-1)).view(*self.index.shape, *x.shape[1:])


class PackedAttention:
    """An ``Attend`` for packed sequences of the given lengths; the same object serves all
    layers.
    """

    def __init__(self, flow: PrecisionFlow, lengths: tuple[int, ...]) -> None:
        self._formats = [site.forward for site in flow.training.sites if site.kind == "attention"]
        self._groups, self._inverse = _pad(lengths)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D] in the dtype of q."""
        return _PackedAttention.apply(
            q, k, v, layer, self._formats[layer], self._groups, self._inverse
        )  # pyright: ignore[reportReturnType]


def _pad(lengths: tuple[int, ...]) -> tuple[list[PaddedGroup], torch.Tensor]:
    """The padded groups, and for each packed row its place in the groups laid end to end."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    groups: list[PaddedGroup] = []
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    offset = 0
    while order:
        longest = lengths[order[0]]
        most = max(1, _GROUP_TOKENS // longest)
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


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        format: Format,
        groups: list[PaddedGroup],
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        queries, keys, values = (Heads.encode(x, format) for x in (q, k, v))
        observe_heads(layer, queries, keys, values)
        padded, log_sum_exps = [], []
        for group in groups:
            output, log_sum_exp = _attend_group(group, queries, keys, values)
            padded.append(output)
            log_sum_exps.append(log_sum_exp)
        output = torch.cat(padded).index_select(0, inverse).to(q.dtype)
        ctx.groups, ctx.inverse, ctx.log_sum_exps = groups, inverse, log_sum_exps
        ctx.encoded = queries, keys, values
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        q, k, v = (heads.dequantised() for heads in ctx.encoded)
        d_output = gradients[0].float()
        delta = (d_output * output.float()).sum(-1)
        padded: list[tuple[torch.Tensor, ...]] = []
        for group, log_sum_exp in zip(ctx.groups, ctx.log_sum_exps, strict=True):
            valid = group.valid[..., None]
            padded.append(
                _group_gradients(
                    group,
                    log_sum_exp,
                    group.gather(q),
                    group.gather(k),
                    group.gather(v),
                    group.gather(d_output) * valid[..., None],
                    group.gather(delta) * valid,
                )
            )
        dq, dk, dv = (
            torch.cat(parts).index_select(0, ctx.inverse) for parts in zip(*padded, strict=True)
        )
        dtype = gradients[0].dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None, None


def _attend_group(
    group: PaddedGroup, queries: Heads, keys: Heads, values: Heads
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

    def tile_at(j: int, n: int, width: int) -> KeyTile:
        return KeyTile.build(
            pair.map(lambda x: x[:, :n, :, j * TILE : j * TILE + width].contiguous())
        )

    result = attend(queries.map(query_layout), group.visible, tile_at)
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
) -> tuple[torch.Tensor, ...]:
    """All FP32: q and d_output [B, L, H, D], k and v [B, L, G, D], delta [B, L, H] -> dq, dk, dv as
    [B L, heads, D].
    """
    batch, length, kv_heads, dim = k.shape
    repeat = q.shape[2] // kv_heads
    scale = dim**-0.5
    k, v = (x.transpose(1, 2).reshape(batch * kv_heads, length, dim) for x in (k, v))

    def rows(x: torch.Tensor, block: slice) -> torch.Tensor:  # [B, L, H, ...] -> [B G, R L', ...]
        part = x[:, block].reshape(batch, -1, kv_heads, repeat, *x.shape[3:]).movedim(1, 3)
        return part.reshape(batch * kv_heads, -1, *x.shape[3:])

    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, length, _QUERY_BLOCK):
        block = slice(first, min(first + _QUERY_BLOCK, length))
        end = block.stop
        q_rows, do_rows = rows(q, block), rows(d_output, block)
        lse = log_sum_exp[..., block].reshape(batch * kv_heads, -1, 1) * log(2.0)
        hidden = torch.arange(end) >= group.visible[:, None, block, None]
        scores = torch.bmm(q_rows, k[:, :end].transpose(1, 2)).mul_(scale).sub_(lse)
        weights = (
            scores.view(batch, kv_heads * repeat, -1, end)
            .masked_fill_(hidden, -torch.inf)
            .view_as(scores)
            .exp_()
        )
        dv[:, :end] += torch.bmm(weights.transpose(1, 2), do_rows)
        ds = (
            torch.bmm(do_rows, v[:, :end].transpose(1, 2))
            .sub_(rows(delta, block)[..., None])
            .mul_(weights)
            .mul_(scale)
        )
        dk[:, :end] += torch.bmm(ds.transpose(1, 2), q_rows)
        dq_rows = torch.bmm(ds, k[:, :end]).view(batch, kv_heads, repeat, -1, dim).movedim(3, 1)
        dq[:, block] = dq_rows.reshape(batch, -1, kv_heads * repeat, dim)
    dk, dv = (
        x.view(batch, kv_heads, length, dim).transpose(1, 2).reshape(batch * length, kv_heads, dim)
        for x in (dk, dv)
    )
    return dq.view(batch * length, kv_heads * repeat, dim), dk, dv
