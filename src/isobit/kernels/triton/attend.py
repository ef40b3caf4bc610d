"""Attention of rollout and training on a GPU, and the paged KV cache.

The cache has an arena for each format, in pages of 128 tokens laid out as
``isobit.kernels.triton.attention`` reads them.  A layer's ``PagedKeys`` are views of it, so that
one launch a tensor copies pages in all layers:

    e4m3    values [2 (K, V), layer, page, KV head * 128 * D] and scale bytes [2, layer, page, KV
            head * 128]
    int8    the same with FP32 scales
    bf16    values alone

Layers with a delta rule have carries in place of pages (``DeltaCarries``), one tensor a layer and
content.

``PackedAttention`` is that of the training forward, causal within each sequence of a packed batch.
``DecodeAttention`` takes one token a sequence and reads nothing from the host, so a CUDA graph can
capture it.  ``PagedAttention`` takes any ragged batch: single new tokens use the decode kernel, and
chunks have the keys of their pages gathered and use the kernel of the training forward.  New tokens
are written to the pages first.  All give the same bits, by the kernels of a back end
(``products``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.observing import is_observed, observe_heads
from isobit.kernels.operands import (
    DecodeBatch,
    DeltaGradients,
    DeltaInputs,
    DeltaWeights,
    KvShape,
    PagedBatch,
    QkvTransform,
)
from isobit.kernels.spec.delta_rule import DeltaCarries
from isobit.kernels.spec.qkv import Heads
from isobit.kernels.triton.attention import SCALES, PackedKeys, PagedKeys
from isobit.kernels.triton.attention_backward import sinks_backward
from isobit.kernels.triton.delta_rule_rollout import PagedDeltaRule
from isobit.kernels.triton.delta_rule_training import PackedDeltaRule, SavedDeltaRule
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.kernels.triton.memory import to_device
from isobit.kernels.triton.products import Products
from isobit.kernels.triton.qkv import Queries, encode_packed, encode_paged, gather_pages
from isobit.kernels.triton.sizes import page_formats
from isobit.precision.flow import Graph, PrecisionFlow
from isobit.precision.quant_tensor import DTYPES, E8M0_BIAS, Format

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


_COPIED = 4096  # words of one copying program


class GpuKvCache:
    """``KvCache`` of a GPU."""

    page_tokens = PAGE_TOKENS

    def __init__(
        self,
        shape: KvShape,
        flow: PrecisionFlow,
        num_pages: int,
        device: torch.device | str,
        num_carries: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.formats = page_formats(shape, flow)
        formats = list(self.formats.values())
        self._arenas = {
            format: _Arena.zeros(formats.count(format), num_pages, shape, format, device)
            for format in dict.fromkeys(formats)
        }
        self.layers = {
            layer: self._arenas[format].layer(formats[:i].count(format))
            for i, (layer, format) in enumerate(self.formats.items())
        }

        def zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        dtype = DTYPES[flow.rollout.activations]
        self.delta = DeltaCarries.of_layers(shape, num_carries, dtype, zeros)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
        device = next(iter(self._arenas.values())).values.device
        pairs = to_device(torch.tensor([list(sources), list(targets)], dtype=torch.int32), device)
        for arena in self._arenas.values():
            arena.copy(pairs)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """K and V [T, G, D] at slots int64 [T] = page * 128 + offset; BF16 has bytes of 127."""
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        paged = self.layers[layer]
        if paged.key_scales is None or paged.value_scales is None:
            keys, values = paged.keys[pages, :, offsets], paged.values[pages, :, offsets]
            units = torch.full(keys.shape[:2], E8M0_BIAS, dtype=torch.uint8, device=keys.device)
            return Heads(keys, units), Heads(values, units)
        dtype = paged.keys.dtype
        keys = paged.keys.view(torch.uint8)[pages, :, offsets].view(dtype)
        values = paged.values.view(torch.uint8)[pages, :, :, offsets].view(dtype)
        return Heads(keys, paged.key_scales[pages, :, offsets]), Heads(
            values, paged.value_scales[pages, :, offsets]
        )

    def copy_carries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy carries of every layer, ``sources[i]`` to ``targets[i]``; targets differ."""
        if not sources or not self.delta:
            return
        device = next(iter(self.delta.values())).states.device
        read, written = to_device(torch.tensor([list(sources), list(targets)]), device)
        for carries in self.delta.values():
            carries.copy(read, written)

    def clear_pages(self, pages: Sequence[int]) -> None:
        for arena in self._arenas.values():
            index = to_device(torch.tensor(pages), arena.values.device)
            arena.values.index_fill_(2, index, 0)
            if arena.scales is not None:
                arena.scales.index_fill_(2, index, 0)

    def clear(self) -> None:
        for arena in self._arenas.values():
            arena.values.zero_()
            if arena.scales is not None:
                arena.scales.zero_()
        for carries in self.delta.values():
            carries.clear()


@dataclass(frozen=True, slots=True)
class _Arena:
    """The layers of one format: values [2, layers, pages, G * 128 * D], 8 bits as uint8, and scales
    [2, layers, pages, G * 128].
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    dtype: torch.dtype  # of the values
    kv_heads: int

    @classmethod
    def zeros(
        cls, layers: int, pages: int, shape: KvShape, format: Format, device: torch.device | str
    ) -> "_Arena":
        """Zeros, so that keys beyond a sequence's end are finite: 0 times a NaN would not be 0."""
        rows, vectors = (2, layers, pages), shape.num_kv_heads * PAGE_TOKENS
        dtype = DTYPES[format]
        raw, scale = torch.uint8 if dtype in SCALES else dtype, SCALES.get(dtype)
        values = torch.zeros((*rows, vectors * shape.head_dim), dtype=raw, device=device)
        scales = None
        if scale is not None:
            scales = torch.zeros((*rows, vectors), dtype=scale, device=device)
        return cls(values, scales, dtype, shape.num_kv_heads)

    def layer(self, index: int) -> PagedKeys:
        """The pages of the format's index-th layer."""
        keys, values = self.values[:, index]
        rows = (keys.shape[0], self.kv_heads)
        keys = keys.view(*rows, PAGE_TOKENS, -1)
        if self.scales is None:
            return PagedKeys(keys, None, values.view(*rows, PAGE_TOKENS, -1), None)
        key_scales, value_scales = self.scales[:, index].view(2, *rows, PAGE_TOKENS)
        values = values.view(*rows, -1, PAGE_TOKENS).view(self.dtype)
        return PagedKeys(keys.view(self.dtype), key_scales, values, value_scales)

    def copy(self, pairs: torch.Tensor) -> None:
        """Sources and targets, int32 [2, n] on the device."""
        for tensor in (self.values, self.scales):
            if tensor is not None:
                words = tensor.view(torch.int32).view(-1, *tensor.view(torch.int32).shape[2:])
                grid = (triton.cdiv(words.shape[2], _COPIED), pairs.shape[1], words.shape[0])
                _copy_kernel[grid](
                    words, pairs[0], pairs[1], words.shape[1], words.shape[2], _COPIED, num_warps=8
                )


@triton.jit
def _copy_kernel(ARENA, SOURCE, TARGET, pages, WORDS: tl.constexpr, N: tl.constexpr):
    """One program N words of one page of one layer's K or V: ARENA [row, page, WORDS]."""
    pair = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * pages
    word = tl.program_id(0) * N + tl.arange(0, N)
    source = (first + tl.load(SOURCE + pair)) * WORDS
    target = (first + tl.load(TARGET + pair)) * WORDS
    tl.store(
        ARENA + target + word, tl.load(ARENA + source + word, mask=word < WORDS), mask=word < WORDS
    )


_ONE = 127  # the E8M0 byte of the scale 1


@dataclass(frozen=True, slots=True)
class Attended:
    """Inputs and outputs of a layer's attention, for the backward."""

    queries: Queries
    keys: PackedKeys
    output: torch.Tensor  # BF16 [T, H, D]
    log_sum_exp: torch.Tensor  # FP32 [T, H], base 2
    window: int | None
    sinks: torch.Tensor | None

    def rows(self, index: torch.Tensor) -> "Attended":
        """The same of the tokens ``index``, on the GPU."""

        def take(x: torch.Tensor) -> torch.Tensor:
            raw = x.view(torch.uint8) if x.itemsize == 1 else x
            return raw.index_select(0, index).view(x.dtype)

        def of_scales(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else take(x)

        queries, keys = self.queries, self.keys
        return Attended(
            Queries(take(queries.values), of_scales(queries.scales)),
            PackedKeys(
                take(keys.keys),
                of_scales(keys.key_scales),
                take(keys.values),
                of_scales(keys.value_scales),
            ),
            take(self.output),
            take(self.log_sum_exp),
            self.window,
            self.sinks,
        )


class PackedAttention:
    """``AttendWithBackward`` for sequences of the given lengths; one object serves all layers."""

    def __init__(
        self,
        products: type[Products],
        graph: Graph,
        lengths: tuple[int, ...],
        positions: torch.Tensor,
    ) -> None:
        """``positions`` int64 [T], on the GPU."""
        self._products, self._graph = products, graph
        self._positions, self._longest = positions, max(lengths)
        ends = torch.tensor(lengths, dtype=torch.int32)
        self._starts, self._lengths = (
            to_device(x.int(), positions.device) for x in (ends.cumsum(0) - ends, ends)
        )
        self._delta: PackedDeltaRule | None = None
        if any(site.kind == "delta" for site in graph.sites):
            self._delta = PackedDeltaRule(lengths, positions.device)

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """[T, (H + 2 G) D] -> [T, H D]."""
        return self.attend(layer, qkv, transform)[0]

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[T, (H + 2 G) D] -> [T, H D], and what the backward reads."""
        format = self._graph.attention_format(layer)
        as_bytes = self._products.as_bytes
        queries, keys = encode_packed(qkv, transform, self._positions, format, as_bytes)
        if is_observed():
            observe_heads(layer, query_heads(queries), *_key_heads(keys, format))
        starts, lengths, longest = self._starts, self._lengths, self._longest
        seen = transform.window, transform.sinks
        out, lse = self._products.prefill_attention(
            queries.values, queries.scales, keys, starts, lengths, starts, lengths, longest,
            longest, *seen,
        )  # fmt: skip
        return out.view(qkv.shape[0], -1), Attended(queries, keys, out, lse, *seen)

    def backward(
        self, attended: Attended, d_output: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [T, H D], BF16 -> dq [T, H, D], dk and dv [T, G, D]; adds that of the
        sinks to ``sinks``, FP32 [H].
        """
        queries, keys, output = attended.queries, attended.keys, attended.output
        if sinks is not None and attended.sinks is not None:
            sums = attended.log_sum_exp, d_output.view_as(output), sinks
            sinks_backward(attended.sinks, output, *sums)
        return self._products.attention_backward(
            queries.values, queries.scales, keys, output, attended.log_sum_exp,
            d_output.view_as(output), self._starts, self._lengths, self._longest, attended.window,
        )  # fmt: skip

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        del layer  # there is no state from one call to the next
        return self._rule.forward(inputs, weights)[0]

    def delta_rule_saving(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, SavedDeltaRule]:
        """[T, values], and what the backward reads."""
        return self._rule.forward(inputs, weights)

    def delta_rule_backward(
        self,
        saved: SavedDeltaRule,
        d_output: torch.Tensor,
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        """The gradient of [T, values] -> those of the inputs, in the same dtype."""
        return self._rule.backward(saved, d_output, weights, gradients)

    @property
    def _rule(self) -> PackedDeltaRule:
        assert self._delta is not None, "the flow has delta rules"
        return self._delta


def query_heads(queries: Queries) -> Heads:
    """Q as an observer compares it: with E8M0 bytes, also where there are no scales; INT8's are
    FP32.
    """
    if queries.scales is None:
        return Heads(
            queries.values, torch.full_like(queries.values[..., 0], _ONE, dtype=torch.uint8)
        )
    if queries.values.dtype == torch.int8:
        return Heads(queries.values, queries.scales)
    return Heads(queries.values, (queries.scales.view(torch.int32) >> 23).to(torch.uint8))


def _key_heads(keys: PackedKeys, format: Format) -> tuple[Heads, Heads]:
    ones = torch.full_like(keys.keys[..., 0], _ONE, dtype=torch.uint8)
    values = keys.values.to(DTYPES[format])  # FP16 copies of 8-bit numbers
    return (
        Heads(keys.keys, ones if keys.key_scales is None else keys.key_scales),
        Heads(values, ones if keys.value_scales is None else keys.value_scales),
    )


class DecodeAttention:
    """``Attend`` for decoding sequences; one object serves all layers."""

    def __init__(self, products: type[Products], cache: GpuKvCache, batch: DecodeBatch) -> None:
        self._products, self._cache, self._batch = products, cache, batch
        self._delta: PagedDeltaRule | None = None
        if cache.delta:
            assert batch.carries is not None, "sequences of a model with delta rules have carries"
            read, written = batch.carries
            self._delta = PagedDeltaRule.decoding(batch.positions, read, written, batch.places)

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        batch, pages = self._batch, self._cache.layers[layer]
        queries = encode_paged(
            qkv, transform, batch.positions, batch.slots, pages, self._products.as_bytes
        )
        out, _ = self._products.decode_attention(
            queries.values, queries.scales, pages, batch.table, batch.lengths, batch.max_length,
            transform.window, transform.sinks,
        )  # fmt: skip
        return out.view(qkv.shape[0], -1)

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        assert self._delta is not None, "the cache has carries for it"
        return self._delta.forward(self._cache.delta[layer], inputs, weights)


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
    """``Attend`` for a ragged batch; one object serves all layers of one forward."""

    def __init__(
        self,
        products: type[Products],
        cache: GpuKvCache,
        batch: PagedBatch,
        positions: torch.Tensor,
    ) -> None:
        """``batch`` on the host, ``positions`` int64 [T] on the GPU."""
        self._products, self._cache, self._positions = products, cache, positions
        self._slots = to_device(batch.slots, positions.device)
        self._delta = PagedDeltaRule.of(batch, positions.device) if cache.delta else None
        counts, lengths = (
            torch.tensor(batch.counts, dtype=torch.int32),
            torch.tensor(batch.lengths, dtype=torch.int32),
        )
        starts = (counts.cumsum(0) - counts).int()
        table = batch.block_table.int()
        self._singles = self._chunks = None
        if bool((one := counts == 1).any()):
            of = lengths[one]
            sent = (to_device(x, positions.device) for x in (starts[one].long(), table[one], of))
            self._singles = _Singles(*sent, max_length=int(of.max()))
        if bool((more := counts > 1).any()):
            new, of = counts[more], lengths[more]
            tensors = starts[more], new, (of.cumsum(0) - of).int(), table[more], of
            sent = (to_device(x, positions.device) for x in tensors)
            self._chunks = _Chunks(*sent, int(new.max()), int(of.max()), int(of.sum()))

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        queries = encode_paged(
            qkv, transform, self._positions, self._slots, self._cache.layers[layer],
            self._products.as_bytes,
        )  # fmt: skip
        if is_observed():
            observe_heads(layer, query_heads(queries), *self._cache.read(layer, self._slots))
        seen = transform.window, transform.sinks
        if self._chunks is None:
            return self._attend_singles(layer, queries, *seen).view(qkv.shape[0], -1)
        out = self._attend_chunks(layer, queries, self._chunks, *seen)
        if self._singles is not None:
            singles = self._attend_singles(layer, queries, *seen)
            out.index_copy_(0, self._singles.rows, singles)
        return out.view(qkv.shape[0], -1)

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        assert self._delta is not None, "the cache has carries for it"
        return self._delta.forward(self._cache.delta[layer], inputs, weights)

    def _attend_singles(
        self, layer: int, queries: Queries, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        singles = self._singles
        assert singles is not None
        values, scales = queries.values, queries.scales
        if self._chunks is not None:
            values = values.view(torch.uint8).index_select(0, singles.rows).view(values.dtype)
            scales = None if scales is None else scales.index_select(0, singles.rows)
        pages = self._cache.layers[layer]
        return self._products.decode_attention(
            values, scales, pages, singles.table, singles.lengths, singles.max_length, window,
            sinks,
        )[0]  # fmt: skip

    def _attend_chunks(
        self,
        layer: int,
        queries: Queries,
        chunks: _Chunks,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        pages = self._cache.layers[layer]
        keys = gather_pages(
            pages, chunks.table, chunks.key_starts, chunks.lengths, chunks.total, chunks.max_length,
            self._products.as_bytes,
        )  # fmt: skip
        return self._products.prefill_attention(
            queries.values, queries.scales, keys, chunks.query_starts, chunks.query_counts,
            chunks.key_starts, chunks.lengths, chunks.max_count, chunks.max_length, window,
            sinks,
        )[0]  # fmt: skip
