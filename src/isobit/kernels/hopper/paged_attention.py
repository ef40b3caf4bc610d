"""Attention of the rollout on Hopper: new tokens of every sequence over its pages, written there
first.

``DecodeAttention`` takes one token a sequence and reads nothing from the host, so it can be
captured in a CUDA graph. ``PagedAttention`` takes any ragged batch: sequences with one new token go
through the decode kernel; those with a chunk of several have the keys of their pages laid end to
end and go through the kernel of the training forward.  Both give the same bits.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.hopper.attention import decode_attention, prefill_attention
from isobit.kernels.hopper.kv_cache import HopperKvCache
from isobit.kernels.hopper.memory import to_device
from isobit.kernels.hopper.packed_attention import query_heads
from isobit.kernels.hopper.qkv import Queries, encode_paged, gather_pages
from isobit.kernels.operands import DecodeBatch, PagedBatch, QkvTransform
from isobit.kernels.trace import is_observed, observe_heads


class DecodeAttention:
    """A attention (``Attend``) for decoding sequences; the same object serves all layers."""

    def __init__(self, cache: HopperKvCache, batch: DecodeBatch) -> None:
        self._cache, self._batch = cache, batch

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Attend in one layer."""
        batch, pages = self._batch, self._cache.layers[layer]
        queries = encode_paged(qkv, transform, batch.positions, batch.slots, pages)
        out, _ = decode_attention(
            queries.values,
            queries.scales,
            pages,
            batch.table,
            batch.lengths,
            batch.max_length,
            transform.window,
        )
        return out.view(qkv.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Singles:
    """The sequences with one new token."""

    rows: torch.Tensor  # int64: their rows of the batch
    table: torch.Tensor
    lengths: torch.Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The sequences with several."""

    query_starts: torch.Tensor  # int32, like all below
    query_counts: torch.Tensor
    key_starts: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    max_count: int
    max_length: int
    total: int  # keys of all of them


class PagedAttention:
    """Attention (``Attend``) for a ragged batch; one object serves all layers of one forward."""

    def __init__(self, cache: HopperKvCache, batch: PagedBatch, positions: torch.Tensor) -> None:
        """``batch`` on the host, ``positions`` int64 [T] on the GPU."""
        self._cache, self._positions = cache, positions
        self._slots = to_device(batch.slots, positions.device)
        counts, lengths = (
            torch.tensor(batch.counts, dtype=torch.int32),
            torch.tensor(batch.lengths, dtype=torch.int32),
        )
        starts = (counts.cumsum(0) - counts).int()
        table = batch.block_table.int()
        self._singles = _singles(counts == 1, starts, table, lengths, positions.device)
        self._chunks = _chunks(counts > 1, starts, counts, table, lengths, positions.device)

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Attend in one layer."""
        queries = encode_paged(
            qkv, transform, self._positions, self._slots, self._cache.layers[layer]
        )
        if is_observed():
            observe_heads(layer, query_heads(queries), *self._cache.read(layer, self._slots))
        if self._chunks is None:
            return self._attend_singles(layer, queries, transform.window).view(qkv.shape[0], -1)
        out = self._attend_chunks(layer, queries, self._chunks, transform.window)
        if self._singles is not None:
            singles = self._attend_singles(layer, queries, transform.window)
            out.index_copy_(0, self._singles.rows, singles)
        return out.view(qkv.shape[0], -1)

    def _attend_singles(self, layer: int, queries: Queries, window: int | None) -> torch.Tensor:
        singles = self._singles
        assert singles is not None
        values, scales = queries.values, queries.scales
        if self._chunks is not None:
            values = values.view(torch.uint8).index_select(0, singles.rows).view(values.dtype)
            scales = None if scales is None else scales.index_select(0, singles.rows)
        pages = self._cache.layers[layer]
        return decode_attention(
            values, scales, pages, singles.table, singles.lengths, singles.max_length, window
        )[0]

    def _attend_chunks(
        self, layer: int, queries: Queries, chunks: _Chunks, window: int | None
    ) -> torch.Tensor:
        pages = self._cache.layers[layer]
        keys = gather_pages(
            pages, chunks.table, chunks.key_starts, chunks.lengths, chunks.total, chunks.max_length
        )
        return prefill_attention(
            queries.values,
            queries.scales,
            keys,
            chunks.query_starts,
            chunks.query_counts,
            chunks.key_starts,
            chunks.lengths,
            chunks.max_count,
            chunks.max_length,
            window,
        )[0]


def _singles(
    chosen: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    device: torch.device,
) -> _Singles | None:
    if not bool(chosen.any()):
        return None
    rows, picked, of = starts[chosen].long(), table[chosen], lengths[chosen]
    return _Singles(*(to_device(x, device) for x in (rows, picked, of)), max_length=int(of.max()))


def _chunks(
    chosen: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    device: torch.device,
) -> _Chunks | None:
    if not bool(chosen.any()):
        return None
    new, of = counts[chosen], lengths[chosen]
    key_starts = (of.cumsum(0) - of).int()
    tensors = (to_device(x, device) for x in (starts[chosen], new, key_starts, table[chosen], of))
    return _Chunks(
        *tensors, max_count=int(new.max()), max_length=int(of.max()), total=int(of.sum())
    )
