"""Attention of the rollout over the paged KV cache: each sequence has one new token while it
decodes, or a chunk of its prompt.

**The cache** is one arena of pages in the flow's format; a page holds 64 tokens of every layer.  A
page is a KV tile: tile j of a sequence is page j of its block table, so page boundaries and
summation boundaries coincide.  Layout per layer: values [2 (K, V), page, KV head, token, dim] in
E4M3, INT8, BF16 or FP32, and their scales [2, page, KV head, token], bytes or, of INT8, FP32.
Layers with a delta rule have no pages: a sequence has a carry of all of them
(``isobit.kernels.spec.delta_rule``).

**Attention** writes new K and V to their slots first; then each query attends over its sequence's
pages with the arithmetic of ``isobit.kernels.spec.attention``.  Sequences with one new token form
one group; prompt chunks form another, padded to the longest chunk.  Within a group, sequences are
sorted by descending length, so that tile j is gathered only for those that have it and see it.
Groups are kept small enough for the processor's cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from isobit.kernels.observing import is_observed, observe_heads, rounded
from isobit.kernels.operands import (
    DeltaInputs,
    DeltaWeights,
    KvShape,
    PagedBatch,
    QkvTransform,
    kv_formats,
)
from isobit.kernels.spec.attention import TILE, KeyTile, attend
from isobit.kernels.spec.delta_rule import DeltaCarries, PagedDelta
from isobit.kernels.spec.qkv import Heads, RopeRows, fixed_bytes, transform_qkv
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import DTYPES, E4M3, Format

PAGE_TOKENS = TILE
_ALIGNED = 64  # bytes


class SpecKvCache:
    """Pages of K and V for all layers with attention, and carries for those with a delta rule; the
    scheduler decides which of them belong to which sequence.
    """

    page_tokens = PAGE_TOKENS

    def __init__(
        self, shape: KvShape, flow: PrecisionFlow, num_pages: int, num_carries: int = 0
    ) -> None:
        self.num_pages = num_pages
        self.formats = kv_formats(shape, flow)
        pages = (2, num_pages, shape.num_kv_heads, PAGE_TOKENS)
        self.layers = {
            layer: _empty_heads(pages, shape.head_dim, format)
            for layer, format in self.formats.items()
        }
        dtype = DTYPES[flow.rollout.activations]
        self.delta = DeltaCarries.of_layers(shape, num_carries, dtype, _empty)

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fixed: torch.Tensor | None = None,
    ) -> None:
        """Encode k and v [T, G, D] and store them at slots int64 [T] = page * 64 + offset, which
        must all be different.  ``fixed``, uint8 [2], are given scales of K and V.
        """
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        arena, both = self.layers[layer], torch.stack([k, v.to(k.dtype)])
        given = None if fixed is None else fixed.view(2, 1, 1)
        heads = Heads.encode(both, self.formats[layer], given)
        for target, source in (
            (_raw(arena.values), _raw(heads.values)),
            (arena.scales, heads.scales),
        ):
            target.transpose(2, 3)[:, pages, offsets] = source

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """K and V, [T, G, D] each, at slots int64 [T] (numbered as in ``write``)."""
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        k, v = (
            self.layers[layer].map(lambda x, i=i: x[i].transpose(1, 2)[pages, offsets])
            for i in range(2)
        )
        return k, v

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of every layer, ``sources[i]`` to ``targets[i]``."""
        for tensor in self._by_page():
            for source, target in zip(sources, targets, strict=True):
                tensor[:, target] = tensor[:, source]

    def copy_carries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy carries of every layer, ``sources[i]`` to ``targets[i]``."""
        read, written = torch.tensor([list(sources), list(targets)], dtype=torch.int64)
        for carries in self.delta.values():
            carries.copy(read, written)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Set pages of every layer to zero, in place."""
        for tensor in self._by_page():
            tensor[:, list(pages)] = 0

    def clear(self) -> None:
        """Set everything to zero, in place."""
        for tensor in self._by_page():
            tensor.zero_()
        for carries in self.delta.values():
            carries.clear()

    def _by_page(self) -> Iterator[torch.Tensor]:
        """Keys, values and their scales, [2, page, ..]."""
        for arena in self.layers.values():
            yield _raw(arena.values)
            yield arena.scales

    def gather(self, layer: int, pages: torch.Tensor, width: int) -> Heads:
        """K and V of the first ``width`` tokens of the given pages, int64 [n] -> [2, n, G, width,
        D].
        """
        return self.layers[layer].map(lambda x: x.index_select(1, pages)[:, :, :, :width])


def _empty_heads(pages: tuple[int, ...], head_dim: int, format: Format) -> Heads:
    """Zeros, so that keys beyond a sequence's end are finite: their probability is 0, and 0 * NaN
    would not be.
    """
    scales = torch.float32 if format == "int8" else torch.uint8
    return Heads(_empty((*pages, head_dim), DTYPES[format]), _empty(pages, scales))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _untouched_zeros(prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _untouched_zeros(size: int) -> torch.Tensor:
    """uint8 [size], aligned as torch aligns it, in memory that the operating system zeroes page by
    page when it is first touched.  torch.zeros writes all of it at once, which takes half a second
    per GiB of a cache of which a short rollout needs little.
    """
    zeros = np.zeros(size + _ALIGNED, np.uint8)
    first = -zeros.ctypes.data % _ALIGNED
    return torch.from_numpy(zeros[first : first + size])


def _raw(values: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, because torch indexes few types on every device; other formats as they are."""
    return values.view(torch.uint8) if values.dtype == E4M3 else values


# Numbers of K in one tile of a group, so that a group's data stays in the processor's cache.
_TILE_NUMBERS = 1 << 19


@dataclass(frozen=True, slots=True)
class _Group:
    rows: torch.Tensor  # int64 [B', L]: rows of the batch (a short chunk repeats its last)
    visible: torch.Tensor  # int64 [B', L]: keys up to a query's own
    pages: torch.Tensor  # int64 [most pages, B']


class PagedAttention:
    """Attention (``Attend``) over the pages of a cache; one object serves all layers of a
    forward.
    """

    def __init__(self, cache: SpecKvCache, batch: PagedBatch, positions: torch.Tensor) -> None:
        """``positions`` int64 [T], of the new tokens."""
        self._cache, self._slots = cache, batch.slots
        self._rope = RopeRows(positions)
        self._delta = PagedDelta(batch) if cache.delta else None
        counts = torch.tensor(batch.counts)
        lengths = torch.tensor(batch.lengths)
        starts = counts.cumsum(0) - counts
        order = torch.argsort(lengths, descending=True, stable=True)
        single = counts[order] == 1
        tile = next(iter(cache.layers.values())).values[0, 0].numel()
        most = max(1, _TILE_NUMBERS // tile)
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
        q, k, v = transform_qkv(layer, qkv, transform, self._rope.of(transform))
        given = transform.scale_bytes
        self._cache.write(layer, self._slots, k, v, None if given is None else given[1:])
        heads = Heads.encode(q, self._cache.formats[layer], fixed_bytes(transform)[0])
        if is_observed():
            observe_heads(layer, heads, *self._cache.read(layer, self._slots))
        outputs = [self._attend(layer, group, heads, transform) for group in self._groups]
        padded = torch.cat(outputs).index_select(0, self._inverse)
        return rounded(padded.reshape(qkv.shape[0], -1), qkv.dtype)

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        assert self._delta is not None, "the cache has carries for it"
        return self._delta.forward(self._cache.delta[layer], inputs, weights)

    def _attend(
        self, layer: int, group: _Group, heads: Heads, transform: QkvTransform
    ) -> torch.Tensor:
        (batch, length), kv_heads = group.rows.shape, transform.num_kv_heads

        def layout(x: torch.Tensor) -> torch.Tensor:  # [T, H, ...] -> [B', G, R, L, ...]
            rows = x.index_select(0, group.rows.view(-1))
            return rows.view(batch, length, kv_heads, -1, *x.shape[2:]).movedim(1, 3).contiguous()

        def tile_at(j: int, sequences: slice, width: int) -> KeyTile:
            return KeyTile.build(self._cache.gather(layer, group.pages[j, sequences], width))

        seen = transform.window, transform.sinks
        output = attend(heads.map(layout), group.visible, tile_at, *seen).output
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
