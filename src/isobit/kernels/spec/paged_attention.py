"""Attention of the rollout: every sequence's new tokens, one while it decodes or a chunk of its
prompt, over its pages.

New K and V are written to their slots first, then each query attends over its sequence's pages with
the arithmetic of ``isobit.kernels.spec.attention``.  Sequences with one new token form one group;
prompt chunks form another, padded to the longest chunk. Within a group sequences stand by
descending length, so that tile j is gathered only for those that have one and see it.  Groups are
kept small enough for the processor's cache.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import PagedBatch, QkvTransform
from isobit.kernels.rope import RopeTable
from isobit.kernels.spec.attention import KeyTile, attend
from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.kv_cache import SpecKvCache
from isobit.kernels.spec.qkv import transform_qkv
from isobit.kernels.trace import is_observed, observe_heads, rounded

_TILE_NUMBERS = (
    1 << 19
)  # of K in one tile of a group: what a group works on stays in the processor's cache


@dataclass(frozen=True, slots=True)
class _Group:
    rows: torch.Tensor  # int64 [B', L]: rows of the batch (a short chunk repeats its last)
    visible: torch.Tensor  # int64 [B', L]: keys up to a query's own
    pages: torch.Tensor  # int64 [most pages, B']


class PagedAttention:
    """Attention (``Attend``) over the pages of a cache; one object serves a forward's layers."""

    def __init__(self, cache: SpecKvCache, batch: PagedBatch, positions: torch.Tensor) -> None:
        """``positions`` int64 [T], of the new tokens."""
        self._cache, self._slots, self._positions = cache, batch.slots, positions
        self._rows: RopeTable | None = None
        counts = torch.tensor(batch.counts)
        lengths = torch.tensor(batch.lengths)
        starts = counts.cumsum(0) - counts
        order = torch.argsort(lengths, descending=True, stable=True)
        single = counts[order] == 1
        most = max(1, _TILE_NUMBERS // cache.layers[0].values[0, 0].numel())
        members = [
            group
            for part in (order[single], order[~single])
            for group in part.split(most)
            if group.numel()
        ]
        self._groups = [_group(m, counts, lengths, starts, batch.block_table) for m in members]
        self._inverse = torch.empty(batch.slots.numel(), dtype=torch.int64)
        rows = torch.cat([group.rows.view(-1) for group in self._groups])
        self._inverse[rows] = torch.arange(rows.numel())

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """[T, (H + 2 G) D] -> [T, H D]."""
        if self._rows is None:
            self._rows = RopeTable(transform.cos, transform.sin).rows(self._positions)
        q, k, v = transform_qkv(layer, qkv, transform, self._rows)
        self._cache.write(layer, self._slots, k, v)
        heads = Heads.encode(q, self._cache.formats[layer])
        if is_observed():
            observe_heads(layer, heads, *self._cache.read(layer, self._slots))
        outputs = [
            self._attend(layer, group, heads, k.shape[1], transform.window)
            for group in self._groups
        ]
        padded = torch.cat(outputs).index_select(0, self._inverse)
        return rounded(padded.reshape(qkv.shape[0], -1), qkv.dtype)

    def _attend(
        self, layer: int, group: _Group, heads: Heads, kv_heads: int, window: int | None
    ) -> torch.Tensor:
        batch, length = group.rows.shape

        def layout(x: torch.Tensor) -> torch.Tensor:  # [T, H, ...] -> [B', G, R, L, ...]
            rows = x.index_select(0, group.rows.view(-1))
            return rows.view(batch, length, kv_heads, -1, *x.shape[2:]).movedim(1, 3).contiguous()

        def tile_at(j: int, sequences: slice, width: int) -> KeyTile:
            return KeyTile.build(self._cache.gather(layer, group.pages[j, sequences], width))

        output = attend(heads.map(layout), group.visible, tile_at, window).output
        return output.movedim(3, 1).reshape(batch * length, -1, output.shape[-1])


def _group(
    members: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
) -> _Group:
    count, length, start = (x[members][:, None] for x in (counts, lengths, starts))
    position = torch.minimum(torch.arange(int(count.max()))[None, :], count - 1)
    return _Group(start + position, length - count + position + 1, table[members].t().contiguous())
