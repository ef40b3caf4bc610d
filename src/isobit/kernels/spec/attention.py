"""Batch-invariant attention: a decoding token, a chunk of a prompt and a packed training batch get
the same bits.

**Forward.**  For one query and the keys j that it sees, in KV tiles of 64 that start at multiples
of 64 from the sequence's own position 0.  Q, K and V come with scales s
(``isobit.kernels.spec.qkv``), c = log2(e) / sqrt(D):

    s_j = (q . k_j s_k) (s_q c) + log2(s_v)          the scale of V enters the exponent
    M   = running max of s,   p_j = 2^(s_j - M)      so p fits FP16, whatever the scales are
    l   = sum_j p_j / s_v                            FP32
    o   = sum_j P(p_j) v_j / l                       P rounds to FP16 (fp8 and int8) or to multiples
                                                     of 2^-23 (bf16, fp32)
    log-sum-exp (base 2) = M + log2(l)

The bits agree because q . k and P . v over a tile are exact in FP64 (at most 53 bits; q . k of INT8
in FP32) and rounded once to FP32; max has no order; the 64 terms of l (zeros where there are fewer
keys) are summed as one contiguous row; and tiles are combined in ascending order by a
multiplication and an addition.
2^x is exp(x ln 2), because `exp2` depends on the position in the tensor.  A masked key has p = 0,
and a tile of masked keys changes nothing: neither M, l and o so far, nor those of a query that has
seen no key yet (M = -inf, l = o = 0).

**Sinks.**  A head may have a further score z, learnt, whose probability goes to no value.  It is a
last term of l, after all tiles, and so of the log-sum-exp:

    M' = max(M, z log2(e))      l' = l 2^(M - M') + 2^(z log2(e) - M')      o' = o l 2^(M - M') / l'

With a sliding window w, a query at position p sees the keys p - w + 1 .. p.  Tiles still count from
position 0; tiles that no query of a call sees are skipped.

**Training.**  ``PackedAttention`` is causal within each sequence of a packed batch and
differentiable.  It encodes Q, K and V in the flow's format and attends over exactly those values.
The backward is straight-through: the gradient of attention over the dequantised Q, K and V is
passed on to their unquantised sources.  With w = exp(scale q.k - lse), and 0 where a query does not
see a key:

    dV = w^T dO      dS = w * (dO V^T - sum(dO * O))      dQ = scale dS K      dK = scale dS^T Q
    dz = -sum over queries of exp(z - lse) sum(dO * O)

Sequences of similar length are padded into groups; a padding row repeats the sequence's last token
and carries no gradient.

Shapes: B sequences by descending length, G KV heads, R query heads per KV head, L queries per
sequence, D head size.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, log2

import torch

from isobit.kernels.observing import observe_heads, rounded
from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaWeights, QkvTransform
from isobit.kernels.spec.delta_rule import DeltaSaved, PackedDelta
from isobit.kernels.spec.qkv import (
    Heads,
    RopeRows,
    factors,
    fixed_bytes,
    stack_heads,
    transform_qkv,
)
from isobit.kernels.spec.quantise import reciprocal_of_byte
from isobit.precision.flow import Graph
from isobit.precision.quant_tensor import AMAX_FLOOR, E4M3, E8M0_BIAS

TILE = 64
_LN2, _LOG2_E = log(2.0), log2(math.e)
_SCALE = AMAX_FLOOR / 128  # below every FP32 scale


@dataclass(frozen=True, slots=True)
class KeyTile:
    """The first w <= 64 keys and values of a tile, for n sequences; no query sees a later one."""

    keys: torch.Tensor  # FP64 (int8: FP32) [n G, D, w], without scales, divided by ``shift``
    key_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], times ``shift``
    values: torch.Tensor  # FP64 [n G, w, D], without scales, divided by ``shift``
    log2_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], of V
    inverse_scales: torch.Tensor  # FP32 [n, G, 1, 1, w], of V
    shift: float  # a power of two

    @classmethod
    def build(cls, pair: Heads) -> "KeyTile":
        """Make a tile from K and V stacked, [2, n, G, w, D]."""
        _, n, groups, width, dim = pair.values.shape
        if pair.values.dtype == torch.int8:
            units, shift = (pair.values[0].float(), pair.values[1].double()), 1.0
        else:
            shifted, shift = pair.shifted_units()
            units = shifted.double().unbind(0)
        k, v = (x.view(n * groups, width, dim) for x in units)
        keys, values = pair.scales[:, :, :, None, None, :].unbind(0)
        if values.dtype == torch.uint8:
            exponents, inverse = values.float() - float(E8M0_BIAS), reciprocal_of_byte(values)
        else:
            # A token that was never written has the scale 0; its probability is 0, too.
            at_least = values.clamp(min=_SCALE)
            exponents, inverse = torch.log2(at_least), at_least.reciprocal()
        key_scales = factors(keys) * shift
        return cls(k.transpose(1, 2), key_scales, v, exponents, inverse, shift)


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    output: torch.Tensor  # FP32 [B, G, R, L, D]
    log_sum_exp: torch.Tensor  # FP32 [B, G, R, L], base 2


TileAt = Callable[[int, slice, int], KeyTile]
Region = tuple[slice, slice, slice, slice]
"""A part of [B, G, R, L]: some sequences, all heads, some queries."""


@dataclass(slots=True)
class _Sums:
    """The sums of every query over the tiles so far: M and l, FP32 [B, G, R, L, 1], and o l, [..,
    D].
    """

    maximum: torch.Tensor
    denominator: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of_nothing(cls, q: torch.Tensor) -> "_Sums":
        """The sums before the first key."""
        denominator = torch.zeros(*q.shape[:-1], 1, dtype=torch.float32)
        return cls(
            torch.full_like(denominator, -torch.inf),
            denominator,
            torch.zeros(q.shape, dtype=torch.float32),
        )

    def add(self, region: Region, tile: "_Sums") -> None:
        """Add a tile's sums, which are relative to the new running maximum."""
        decay = torch.exp((self.maximum[region] - _finite(tile.maximum)) * _LN2)
        self.maximum[region] = tile.maximum
        self.denominator[region] = self.denominator[region] * decay + tile.denominator
        self.total[region] = self.total[region] * decay + tile.total

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Add the term of each head's sink, FP32 [G, R, 1, 1], to the denominator."""
        scores = sinks * _LOG2_E
        maximum = torch.maximum(self.maximum, scores)
        decay = torch.exp((self.maximum - maximum) * _LN2)
        self.denominator = self.denominator * decay + torch.exp((scores - maximum) * _LN2)
        self.maximum, self.total = maximum, self.total * decay


def attend(
    queries: Heads,
    visible: torch.Tensor,
    tile_at: TileAt,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> AttentionOutput:
    """Attention of queries [B, G, R, L, D].

    ``visible``, int64 [B, L], is the number of keys up to each query's own: at least 1, not
    decreasing along L, with the sequences by descending last value.  The query sees the last
    ``window`` of them, or all.  ``tile_at(j, s, w)`` gives the first w keys of tile j for the
    sequences of the slice s.  ``sinks`` [G R] are those of the heads.
    """
    q = queries.units() if queries.values.dtype == torch.int8 else queries.units().double()
    q_scale = (factors(queries.scales) * (log2(math.e) / q.shape[-1] ** 0.5))[..., None]
    narrow = queries.values.dtype in (E4M3, torch.int8)
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
    if sinks is not None:
        sums.add_sinks(sinks.float().view(*q.shape[1:3], 1, 1))
    return AttentionOutput(
        sums.total / (sums.denominator / shift),
        (sums.maximum + torch.log2(sums.denominator)).squeeze(-1),
    )


def first_seen_key(visible: torch.Tensor, window: int | None) -> torch.Tensor:
    """The first key that each query sees, int64 like ``visible``."""
    return torch.zeros_like(visible) if window is None else (visible - window).clamp_(min=0)


def _regions(visible: torch.Tensor, first_seen: torch.Tensor) -> Iterator[tuple[int, Region]]:
    """Each tile that any query sees, in ascending order, with the queries that may see it."""
    most_of_sequence, most_of_query = visible[:, -1].tolist(), visible.amax(0).tolist()
    # Descending along the sequences and ascending along the queries, so either end can be cut off.
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
    """The keys of a tile that the queries do not see, bool [n, L', w], or None where they see all
    of them. ``visible`` and ``first_seen`` [n, L'] count from the tile's start.
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
    missing = TILE - x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()
    return padded.sum(-1, keepdim=True)


_ROUNDING = 2.0**-10
"""The backward limits a score minus the log-sum-exp to this.  It is never above 0 but by rounding,
which can make it large where scores are millions, and their weights infinite.
"""
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
    """Inputs and outputs of one layer's attention, for the backward."""

    encoded: tuple[Heads, Heads, Heads]
    """Q [T, H, D], K and V [T, G, D]."""
    output: torch.Tensor
    """[T, H, D]"""
    log_sum_exp: torch.Tensor
    """FP32 [T, H], base 2."""
    window: int | None
    sinks: torch.Tensor | None

    def rows(self, index: torch.Tensor) -> "Attended":
        """The same of the tokens ``index``."""

        def take(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, index)

        q, k, v = (heads.map(take) for heads in self.encoded)
        moved = take(self.output), take(self.log_sum_exp)
        return replace(self, encoded=(q, k, v), output=moved[0], log_sum_exp=moved[1])


class PackedAttention:
    """Attention for packed sequences of the given lengths (``AttendWithBackward``); one object
    serves all layers.
    """

    def __init__(self, graph: Graph, lengths: tuple[int, ...], positions: torch.Tensor) -> None:
        """``positions`` int64 [T], from 0 in each sequence."""
        self._graph, self._lengths = graph, lengths
        self._groups, self._inverse = _pad(lengths)
        self._rope = RopeRows(positions)

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """[T, (H + 2 G) D] -> [T, H D]."""
        return self.attend(layer, qkv, transform)[0]

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[T, (H + 2 G) D] -> [T, H D], and what the backward reads."""
        format = self._graph.attention_format(layer)
        made = transform_qkv(layer, qkv, transform, self._rope.of(transform))
        q, k, v = (
            Heads.encode(x, format, fixed)
            for x, fixed in zip(made, fixed_bytes(transform), strict=True)
        )
        observe_heads(layer, q, k, v)
        seen = transform.window, transform.sinks
        found = [_attend_group(group, q, k, v, *seen) for group in self._groups]
        wide, log_sum_exp = (
            torch.cat(parts).index_select(0, self._inverse) for parts in zip(*found, strict=True)
        )
        output = rounded(wide.reshape(qkv.shape[0], -1), qkv.dtype)
        heads = output.view(wide.shape)
        return output, Attended((q, k, v), heads, log_sum_exp, *seen)

    def backward(
        self, attended: Attended, d_output: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [T, H D] -> dq [T, H, D], dk and dv [T, G, D], in the same dtype; adds
        that of the sinks to ``sinks``, FP32 [H].
        """
        output = attended.output
        q, k, v = (heads.dequantised() for heads in attended.encoded)
        wide = d_output.view_as(output).float()
        delta = (wide * output.float()).sum(-1)
        if sinks is not None and attended.sinks is not None:
            weights = torch.exp(attended.sinks.float() - attended.log_sum_exp * _LN2)
            sinks.sub_((weights * delta).sum(0))
        padded: list[tuple[torch.Tensor, ...]] = []
        for group in self._groups:
            valid = group.valid[..., None]
            padded.append(
                _group_gradients(
                    group,
                    group.gather(attended.log_sum_exp),
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

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        del layer  # nothing is kept
        return self._delta.forward(inputs, weights)[0]

    def delta_rule_saving(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, DeltaSaved]:
        """[T, values], and what the backward reads."""
        return self._delta.forward(inputs, weights)

    def delta_rule_backward(
        self,
        saved: DeltaSaved,
        d_output: torch.Tensor,
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        """The gradient of [T, values] -> those of the inputs."""
        return self._delta.backward(saved, d_output, weights, gradients)

    @cached_property
    def _delta(self) -> PackedDelta:
        return PackedDelta(self._lengths)


def _pad(lengths: tuple[int, ...]) -> tuple[list[PaddedGroup], torch.Tensor]:
    """The padded groups, and the place of each packed row in the groups laid end to end."""
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
    group: PaddedGroup,
    queries: Heads,
    keys: Heads,
    values: Heads,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output FP32 [B L, H, D] and log-sum-exp (base 2) [B L, H]."""
    batch, length = group.index.shape
    kv_heads = keys.scales.shape[-1]

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

    result = attend(queries.map(query_layout), group.visible, tile_at, window, sinks)
    output, log_sum_exp = result.output.movedim(3, 1), result.log_sum_exp.movedim(3, 1)
    rows = batch * length
    return output.reshape(rows, -1, output.shape[-1]), log_sum_exp.reshape(rows, -1)


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
    """q and d_output [B, L, H, D], k and v [B, L, G, D], log_sum_exp and delta [B, L, H], all FP32
    -> dq, dk, dv as [B L, heads, D].  For each block of queries, only keys that one of them sees
    are read.
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
        lse = rows(log_sum_exp, block)[..., None] * log(2.0)
        key = torch.arange(seen.start, seen.stop)
        hidden = key >= group.visible[:, None, block, None]
        if window is not None:
            hidden |= key < first_seen[:, None, block, None]
        scores = torch.bmm(q_rows, k[:, seen].transpose(1, 2)).mul_(scale).sub_(lse)
        weights = (
            scores.view(batch, kv_heads * repeat, -1, key.numel())
            .masked_fill_(hidden, -torch.inf)
            .view_as(scores)
            .clamp_(max=_ROUNDING)
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
