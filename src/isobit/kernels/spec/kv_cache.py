"""The paged KV cache in the flow's format: one arena of pages, every page 64 tokens of every layer.

A page is a KV tile: tile j of a sequence is page j of its block table, so a page boundary and a
summation boundary are one thing. Layout a layer: values [2 (K, V), page, KV head, token, dim] in
E4M3, BF16 or FP32, and their E8M0 scale bytes [2, page, KV head, token].
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from isobit.kernels.operands import KvShape, kv_formats
from isobit.kernels.spec.attention import TILE
from isobit.kernels.spec.heads import Heads
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import DTYPES, E4M3, Format

PAGE_TOKENS = TILE
_ALIGNED = 64  # bytes


class SpecKvCache:
    """Pages of K and V for all layers; which page belongs to whom is the scheduler's business."""

    page_tokens = PAGE_TOKENS

    def __init__(self, shape: KvShape, flow: PrecisionFlow, num_pages: int) -> None:
        self.num_pages = num_pages
        self.formats: tuple[Format, ...] = kv_formats(shape, flow)
        pages = (2, num_pages, shape.num_kv_heads, PAGE_TOKENS)
        self.layers = [_empty_heads(pages, shape.head_dim, format) for format in self.formats]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode k and v [T, G, D] and store them at slots int64 [T] = page * 64 + offset, all
        different.
        """
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        arena, both = self.layers[layer], torch.stack([k, v.to(k.dtype)])
        heads = Heads.encode(both, self.formats[layer])
        for target, source in (
            (_raw(arena.values), _raw(heads.values)),
            (arena.bytes, heads.bytes),
        ):
            target.transpose(2, 3)[:, pages, offsets] = source

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """K and V at slots int64 [T], as ``write`` has them: [T, G, D] each."""
        pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        k, v = (
            self.layers[layer].map(lambda x, i=i: x[i].transpose(1, 2)[pages, offsets])
            for i in range(2)
        )
        return k, v

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of every layer, ``sources[i]`` to ``targets[i]``."""
        for arena in self.layers:
            for tensor in (_raw(arena.values), arena.bytes):
                for source, target in zip(sources, targets, strict=True):
                    tensor[:, target] = tensor[:, source]

    def clear(self) -> None:
        """Zeros everywhere, in place."""
        for arena in self.layers:
            _raw(arena.values).zero_()
            arena.bytes.zero_()

    def gather(self, layer: int, pages: torch.Tensor, width: int) -> Heads:
        """K and V of the first ``width`` tokens of the given pages, int64 [n] -> [2, n, G, width,
        D].
        """
        return self.layers[layer].map(lambda x: x.index_select(1, pages)[:, :, :, :width])


def _empty_heads(pages: tuple[int, ...], head_dim: int, format: Format) -> Heads:
    """Zeros, so that keys beyond a sequence's end are finite: their probability is 0, and 0 * NaN
    would not be.
    """
    dtype = DTYPES[format]
    values = _untouched_zeros(prod(pages) * head_dim * dtype.itemsize).view(dtype)
    return Heads(values.view(*pages, head_dim), _untouched_zeros(prod(pages)).view(pages))


def _untouched_zeros(size: int) -> torch.Tensor:
    """uint8 [size], aligned as torch does it: memory that the operating system gives, zeroed, page
    by page where it is first written or read.  torch.zeros writes all of it at once, half a second
    for each GiB of a cache of which a short rollout needs little.
    """
    zeros = np.zeros(size + _ALIGNED, np.uint8)
    first = -zeros.ctypes.data % _ALIGNED
    return torch.from_numpy(zeros[first : first + size])


def _raw(values: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, because torch indexes few types on every device; other formats as they are."""
    return values.view(torch.uint8) if values.dtype == E4M3 else values
