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
of masked keys changes nothing.

Shapes: B sequences by descending length, G KV heads, R query heads a KV head, L queries a sequence,
D head size.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
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


TileAt = Callable[[int, int, int], KeyTile]


def attend(queries: Heads, visible: torch.Tensor, tile_at: TileAt) -> AttentionOutput:
    """Queries [B, G, R, L, D]; ``visible`` int64 [B, L] is how many keys each query sees (from 1,
    not falling along L, and the sequences by descending last value); ``tile_at(j, n, w)`` gives the
    first w keys of tile j for the first n sequences.
    """
    dim = queries.values.shape[-1]
    q = queries.units().double()
    q_scale = (scale_of_byte(queries.bytes) * (log2(math.e) / dim**0.5))[..., None]
    narrow = queries.values.dtype == E4M3
    most_of_sequence = visible[:, -1].tolist()
    most_of_query = visible.amax(0).tolist()
    first_tile = tile_at(0, len(most_of_sequence), min(TILE, most_of_sequence[0]))
    maximum, denominator, total = _tile_sums(q, q_scale, first_tile, visible, None, narrow)
    for j in range(1, -(-most_of_sequence[0] // TILE)):
        n = bisect_right(most_of_sequence, -TILE * j - 1, key=lambda count: -count)
        first = bisect_right(most_of_query, TILE * j)
        tile = tile_at(j, n, min(TILE, most_of_sequence[0] - TILE * j))
        region = (slice(0, n), slice(None), slice(None), slice(first, None))
        old = maximum[region]
        new, sums, products = _tile_sums(
            q[region], q_scale[region], tile, visible[:n, first:] - TILE * j, old, narrow
        )
        decay = torch.exp((old - new) * _LN2)
        maximum[region] = new
        denominator[region] = denominator[region] * decay + sums
        total[region] = total[region] * decay + products
    return AttentionOutput(
        total / (denominator / first_tile.shift), (maximum + torch.log2(denominator)).squeeze(-1)
    )


def _tile_sums(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    tile: KeyTile,
    seen: torch.Tensor,
    maximum: torch.Tensor | None,
    narrow: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One tile for queries [n, G, R, L', D]: the new running maximum, sum_j p_j / s_v, and sum_j
    P(p_j) v_j; ``seen`` [n, L'] counts the visible keys from the tile's start.
    """
    n, groups, repeat, length, dim = q.shape
    width = tile.values.shape[1]
    scores = (
        torch.bmm(q.reshape(n * groups, repeat * length, dim), tile.keys)
        .float()
        .view(n, groups, repeat, length, width)
    )
    scores.mul_(tile.key_scales).mul_(q_scale).add_(tile.log2_scales)
    if int(seen.amin()) < width:
        hidden = torch.arange(width) >= seen[:, :, None]
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    new = scores.amax(-1, keepdim=True)
    if maximum is not None:
        new = torch.maximum(maximum, new)
    p = torch.exp(scores.sub_(new).mul_(_LN2))
    sums = _sum_of_64(p * tile.inverse_scales)
    p = p.half().float() if narrow else p.add_(1.0).sub_(1.0)
    products = torch.bmm(p.view(n * groups, repeat * length, width).double(), tile.values).float()
    return new, sums, products.view(n, groups, repeat, length, dim)


def _sum_of_64(x: torch.Tensor) -> torch.Tensor:
    """[..., w <= 64] -> [..., 1], padded with zeros to 64 and summed contiguously: one order of
    addition whatever w is.
    """
    return torch.nn.functional.pad(x, (0, TILE - x.shape[-1])).sum(-1, keepdim=True)
