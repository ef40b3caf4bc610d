"""The paged KV cache on Hopper: an arena a format, every page 128 tokens, laid out as
``isobit.kernels.hopper.attention`` reads it.

    e4m3    values [2 (K, V), layer, page, KV head * 128 * D] and scale bytes [2, layer, page, KV
            head * 128]
    bf16    values alone

A layer's ``PagedKeys`` are views of its format's arena, so that pages are copied in all layers by
one launch a tensor.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.attention import PagedKeys
from isobit.kernels.hopper.memory import to_device
from isobit.kernels.hopper.sizes import page_formats
from isobit.kernels.hopper.sizes import page_tokens as PAGE_TOKENS
from isobit.kernels.operands import KvShape
from isobit.kernels.spec.heads import Heads
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import E4M3, E8M0_BIAS, Format

_COPIED = 4096  # words of one copying program


class HopperKvCache:
    """Pages of K and V for all layers; which page belongs to whom is the scheduler's business."""

    page_tokens = PAGE_TOKENS

    def __init__(
        self, shape: KvShape, flow: PrecisionFlow, num_pages: int, device: torch.device | str
    ) -> None:
        self.num_pages = num_pages
        self.formats = page_formats(shape, flow)
        self._arenas = {
            format: _Arena.zeros(self.formats.count(format), num_pages, shape, format, device)
            for format in dict.fromkeys(self.formats)
        }
        self.layers = [
            self._arenas[format].layer(self.formats[:i].count(format))
            for i, format in enumerate(self.formats)
        ]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source page to its target, in every layer.  The targets are all different, and
        none of them is a source.
        """
        if not sources:
            return
        device = next(iter(self._arenas.values())).values.device
        pairs = to_device(torch.tensor([list(sources), list(targets)], dtype=torch.int32), device)
        for arena in self._arenas.values():
            arena.copy(pairs)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """K and V at slots int64 [T] = page * 128 + offset: [T, G, D] each; in BF16 with scale
        bytes of 127.
        """
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        paged = self.layers[layer]
        if paged.key_bytes is None or paged.value_bytes is None:
            keys, values = paged.keys[pages, :, offsets], paged.values[pages, :, offsets]
            units = torch.full(keys.shape[:2], E8M0_BIAS, dtype=torch.uint8, device=keys.device)
            return Heads(keys, units), Heads(values, units)
        keys = paged.keys.view(torch.uint8)[pages, :, offsets].view(E4M3)
        values = paged.values.view(torch.uint8)[pages, :, :, offsets].view(E4M3)
        return Heads(keys, paged.key_bytes[pages, :, offsets]), Heads(
            values, paged.value_bytes[pages, :, offsets]
        )

    def clear(self) -> None:
        """Zeros everywhere, in place."""
        for arena in self._arenas.values():
            arena.values.zero_()
            if arena.bytes is not None:
                arena.bytes.zero_()


@dataclass(frozen=True, slots=True)
class _Arena:
    """The layers of one format: values [2, layers, pages, G * 128 * D], E4M3 as uint8, and scale
    bytes [2, layers, pages, G * 128].
    """

    values: torch.Tensor
    bytes: torch.Tensor | None
    kv_heads: int

    @classmethod
    def zeros(
        cls, layers: int, pages: int, shape: KvShape, format: Format, device: torch.device | str
    ) -> "_Arena":
        """Zeros, so that keys beyond a sequence's end are finite: their probability is 0, and 0 *
        NaN would not be.
        """
        rows, vectors = (2, layers, pages), shape.num_kv_heads * PAGE_TOKENS
        dtype = torch.uint8 if format == "e4m3" else torch.bfloat16
        values = torch.zeros((*rows, vectors * shape.head_dim), dtype=dtype, device=device)
        scales = (
            torch.zeros((*rows, vectors), dtype=torch.uint8, device=device)
            if format == "e4m3"
            else None
        )
        return cls(values, scales, shape.num_kv_heads)

    def layer(self, index: int) -> PagedKeys:
        """The pages of the format's index-th layer."""
        keys, values = self.values[:, index]
        rows = (keys.shape[0], self.kv_heads)
        keys = keys.view(*rows, PAGE_TOKENS, -1)
        if self.bytes is None:
            return PagedKeys(keys, None, values.view(*rows, PAGE_TOKENS, -1), None)
        key_bytes, value_bytes = self.bytes[:, index].view(2, *rows, PAGE_TOKENS)
        return PagedKeys(
            keys.view(E4M3), key_bytes, values.view(*rows, -1, PAGE_TOKENS).view(E4M3), value_bytes
        )

    def copy(self, pairs: torch.Tensor) -> None:
        """Sources and targets, int32 [2, n] on the device."""
        for tensor in (self.values, self.bytes):
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
