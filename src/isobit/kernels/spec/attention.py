"""Attention whose bits do not depend on who asks: a decoding token, a chunk of a prompt, or a
packed training batch.

For one query and the keys j that it may see, in KV tiles of 64 that start at multiples of 64 from
the sequence's own position 0. Q, K and V come with power-of-two scales s
(``isobit.kernels.spec.heads``), c = log2(e) / sqrt(D):

    s_j = (q . k_j s_k) (s_q c) + log2(s_v)          the scale of V enters the exponent
    M   = running max of s,   p_j = 2^(s_j - M)      so that p fits FP16, whatever the scales are
    l   = sum_j p_j / s_v                            FP32
    o   = sum_j P(p_j) v_j / l                       P rounds to FP16 (fp8 flow) or to multiples of
                                                     2^-23 (bf16, fp32)
    log-sum-exp (base 2) = M + log2(l)

Why the bits agree: q . k and P . v over a tile are exact in FP64 (at most 53 bits) and rounded once
to FP32; max has no order; the 64 terms of l (zeros where there are fewer keys) are summed as one
contiguous row; tiles are combined in ascending order by a multiplication and an addition. 2^x is
exp(x ln 2), because `exp2` depends on the place in the tensor.  A masked key has p = 0 and a tile
of masked keys changes nothing: neither M, l and o of before, nor those of a query that has seen no
key yet (M = -inf, l = o = 0).

With a sliding window w a query at position p sees the keys p - w + 1 .. p.  Tiles still count from
position 0; those that no query of a call sees are not touched.

Shapes: B sequences by descending length, G KV heads, R query heads a KV head, L queries a sequence,
D head size.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, log2

import torch

from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.quantise import reciprocal_of_byte, scale_of_byte
from isobit.precision.formats import E4M3, E8M0_BIAS

TILE = 64
_LN2 = log(2.0)


@dataclass(frozen=True, slots=True)
class KeyTile:
    """The first w <= 64 keys and values of a tile, of n sequences; nobody sees a later one."""

    keys: torch.Tensor  # FP64 [n G, D, w], without scales, divided by ``shift``
    key_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], times ``shift``
    values: torch.Tensor  # FP64 [n G, w, D], without scales, divided by ``shift``
    log2_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], of V
    inverse_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], of V
    shift: float  # a power of two

    @classmethod
    def build(cls, pair: Heads) -> "KeyTile":
        """From K and V together, [2, n, G, w, D]."""
        _, n, groups, width, dim = pair.values.shape
        shifted, shift = pair.shifted_units()
        units = shifted.view(2, n * groups, width, dim).double()
        key_byte, value_byte = pair.bytes[:, :, :, None, None, :].unbind(0)
        return cls(
            units[0].transpose(1, 2),
            scale_of_byte(key_byte).mul_(shift),
            units[1],
            value_byte.float() - float(E8M0_BIAS),
            reciprocal_of_byte(value_byte),
            shift,
        )


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """What attention gives for each query."""

    output: torch.Tensor  # FP32 [B, G, R, L, D]
    log_sum_exp: torch.Tensor  # FP32 [B, G, R, L], base 2


TileAt = Callable[[int, slice, int], KeyTile]
Region = tuple[slice, slice, slice, slice]
"""Some sequences, all heads, some queries: of [B, G, R, L]."""


@dataclass(slots=True)
class _Sums:
    """Of every query, over the tiles so far: M and l, FP32 [B, G, R, L, 1], and o l, [.., D]."""

    maximum: torch.Tensor
    denominator: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of_nothing(cls, q: torch.Tensor) -> "_Sums":
        """Before the first key."""
        denominator = torch.zeros(*q.shape[:-1], 1)
        return cls(torch.full_like(denominator, -torch.inf), denominator, torch.zeros(q.shape))

    def add(self, region: Region, tile: "_Sums") -> None:
        """A tile's sums, below the new running maximum."""
        decay = torch.exp((self.maximum[region] - _finite(tile.maximum)) * _LN2)
        self.maximum[region] = tile.maximum
        self.denominator[region] = self.denominator[region] * decay + tile.denominator
        self.total[region] = self.total[region] * decay + tile.total


def attend(
    queries: Heads, visible: torch.Tensor, tile_at: TileAt, window: int | None = None
) -> AttentionOutput:
    """Queries [B, G, R, L, D]; ``visible`` int64 [B, L] is how many keys there are up to each
    query's own (from 1, not falling along L, and the sequences by descending last value), of which
    it sees the last ``window``, or all; ``tile_at(j, s, w)`` gives the first w keys of tile j for
    the sequences of the slice s.
    """
    q = queries.units().double()
    q_scale = (scale_of_byte(queries.bytes) * (log2(math.e) / q.shape[-1] ** 0.5))[..., None]
    narrow = queries.values.dtype == E4M3
    first_seen = first_seen_key(visible, window)
    sums = None if window is None else _Sums.of_nothing(q)
    shift, most = 1.0, int(visible[0, -1])
    for j, region in _regions(visible, first_seen):
        sequences, _, _, rows = region
        tile = tile_at(j, sequences, min(TILE, most - TILE * j))
        shift = tile.shift
        hidden = _hidden(
            visible[sequences, rows] - TILE * j,
            None if window is None else first_seen[sequences, rows] - TILE * j,
            tile.values.shape[1],
        )
        old = None if sums is None else sums.maximum[region]
        made = _tile_sums(q[region], q_scale[region], tile, hidden, old, narrow)
        if sums is None:
            sums = made  # without a window every query sees a key of tile 0
        else:
            sums.add(region, made)
    assert sums is not None
    return AttentionOutput(
        sums.total / (sums.denominator / shift),
        (sums.maximum + torch.log2(sums.denominator)).squeeze(-1),
    )


def first_seen_key(visible: torch.Tensor, window: int | None) -> torch.Tensor:
    """The first key that each query sees, int64 like ``visible``."""
    return torch.zeros_like(visible) if window is None else (visible - window).clamp_(min=0)


def _regions(visible: torch.Tensor, first_seen: torch.Tensor) -> Iterator[tuple[int, Region]]:
    """Each tile that somebody sees, in ascending order, with the queries that may see it."""
    most_of_sequence, most_of_query = visible[:, -1].tolist(), visible.amax(0).tolist()
    # Falling along the sequences and rising along the queries, so that either end can be cut off.
    first_of_sequence = first_seen[:, 0].cummin(0).values.tolist()
    first_of_query = first_seen.amin(0).tolist()
    for j in range(first_of_sequence[-1] // TILE, -(-most_of_sequence[0] // TILE)):
        start, end = TILE * j, TILE * (j + 1)
        sequences = slice(
            bisect_right(first_of_sequence, -end, key=lambda first: -first),
            bisect_right(most_of_sequence, -start - 1, key=lambda count: -count),
        )
        rows = slice(bisect_right(most_of_query, start), bisect_left(first_of_query, end))
        if sequences.start < sequences.stop and rows.start < rows.stop:
            yield j, (sequences, slice(None), slice(None), rows)


def _hidden(
    visible: torch.Tensor, first_seen: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """Which keys of a tile the queries do not see, bool [n, L', w], or None where they see all;
    ``visible`` and ``first_seen`` [n, L'] count from the tile's start.
    """
    key, hidden = torch.arange(width), None
    if int(visible.amin()) < width:
        hidden = key >= visible[:, :, None]
    if first_seen is not None and int(first_seen.amax()) > 0:
        before = key < first_seen[:, :, None]
        hidden = before if hidden is None else hidden | before
    return hidden


def _tile_sums(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    tile: KeyTile,
    hidden: torch.Tensor | None,
    maximum: torch.Tensor | None,
    narrow: bool,
) -> _Sums:
    """One tile for queries [n, G, R, L', D]: the new running maximum, sum_j p_j / s_v, and sum_j
    P(p_j) v_j.
    """
    n, groups, repeat, length, dim = q.shape
    width = tile.values.shape[1]
    scores = (
        torch.bmm(q.reshape(n * groups, repeat * length, dim), tile.keys)
        .float()
        .view(n, groups, repeat, length, width)
    )
    scores.mul_(tile.key_scales).mul_(q_scale).add_(tile.log2_scales)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    new = scores.amax(-1, keepdim=True)
    if maximum is not None:
        new = torch.maximum(maximum, new)
    p = torch.exp(scores.sub_(_finite(new)).mul_(_LN2))
    sums = _sum_of_64(p * tile.inverse_scales)
    p = p.half().float() if narrow else p.add_(1.0).sub_(1.0)
    products = torch.bmm(p.view(n * groups, repeat * length, width).double(), tile.values).float()
    return _Sums(new, sums, products.view(n, groups, repeat, length, dim))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """What may be taken from scores: a query that has seen no key has the maximum -inf."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _sum_of_64(x: torch.Tensor) -> torch.Tensor:
    """[..., w <= 64] -> [..., 1], padded with zeros to 64 and summed contiguously: one order of
    addition whatever w is.
    """
    return torch.nn.functional.pad(x, (0, TILE - x.shape[-1])).sum(-1, keepdim=True)
