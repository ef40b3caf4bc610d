"""Batch-invariant attention on every card since Ampere: decode over pages, prefill and training
over packed sequences.

The kernels have an E4M3, an INT8 and a BF16 form.  c = log2(e) / sqrt(D), M the running maximum of
s; a masked key has s = -inf:

    E4M3    s_j = (q . k_j) s_k (s_q c) + log2(s_v)    8-bit MMA, then one product and one fma in
            p_j = 2^(s_j - M)                          FP32
            l   = sum_j p_j / s_v                      FP32, along a fixed tree over the key index
            o   = sum_j FP16(p_j) FP16(v_j) / l        FP16 MMA; E4M3 -> FP16 is exact
    INT8    the same with an INT8 MMA, whose INT32 sums are exact in FP32, and with FP32 scales, of
            which log2(s_v) and 1 / s_v are rounded
    BF16    s_j = (q . k_j) c
            p_j = 2^fma(q . k_j, c, -M)
            l   = sum_j p_j
            o   = sum_j BF16(p_j) v_j / l

in tiles of keys.  The keys are cut into parts of 8192 at fixed positions.  A part starts from
nothing; parts are joined in ascending order:

    M' = max(M, m)    O' = o 2^(m - M') + O 2^(M - M')    L' = l 2^(m - M') + L 2^(M - M')

Decode runs the parts of few sequences in parallel and joins them in a second kernel, and those of
many one after the other; prefill has a launch for each part.  All do the same operations on the
same numbers, because

  - Tiles and parts start at multiples of their size from the sequence's position 0.
  - A product's bits depend on the instruction and on the order of its inner sum only, which are the
    same with keys on the M side (decode: 16 queries fill the N side) as with queries there
    (prefill: P stays in registers).
  - Everything between the two products is one function, ``_weigh``: `max` has no order; the sums
    add two numbers at a time along a fixed tree (``_partial_sums``, ``_final_sum``) in any layout.
  - With ``enable_fp_fusion=False`` and explicit fma, the compiler cannot contract a multiplication
    and an addition in one kernel only.

A ``Build`` has the tiles of a generation.  The tile of keys belongs to the bits, so those of two
builds may differ; within one it depends on the format and the head size alone.

``PORTABLE`` is for ``mma.sync``, whose steps of K are 16 numbers, and takes at most 99 KiB of
shared memory.  Which 16 keys a step has is Triton's choice: it gives a thread four neighbours where
it sees that an operand was loaded in 8 bits, and two otherwise.  Prefill's P comes from registers
and its V is FP16, so V of decode is sealed against that look.  E4M3 is bytes
(``isobit.kernels.triton.e4m3``), multiplied as FP16: 2^-16 of q . k, which c takes back.  There
only the scale of a vector tells that it is NaN.

With a sliding window w a query at position p sees the keys p - w + 1 .. p.  A program begins with
the tile of the first key that its queries see, and earlier parts are skipped.  A query that has
seen no key yet has M = -inf, L = O = 0, which tiles of masked keys do not change: so prefill, whose
queries share tiles, and decode agree.

The sink of a head (``isobit.kernels.spec.attention``), a score z whose probability goes to no
value, comes behind all parts, where o is divided by l:

    M' = max(M, z log2(e))    l' = l 2^(M - M') + 2^(z log2(e) - M')    o' = o 2^(M - M') / l'

A NaN in K or V reaches the output of every query that sees it.  One in V also reaches the earlier
queries of its tile, since the weight of a masked key is multiplied too: beyond a sequence's length
pages may hold any finite numbers, and scales of zero.

Layouts.  Pages of 128 tokens: K [page, G, token, D]; V [page, G, D, token], transposed, because a
tile of 8 bits cannot be transposed on its way to the tensor cores; scales [page, G, token], E8M0
bytes in the E4M3 form and FP32 in the INT8 form.  Packed: K [T, G, D], V [T, G, D] as FP16 copies
of the 8-bit values, scales [T, G].  In the BF16 form K and V are both [page, G, token, D] or [T, G,
D], without scales.  Kernels count D to WIDTH, a power of two, with zeros.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.e4m3 import PRODUCT_SCALE, decoded
from isobit.kernels.triton.heads import MOST_QUERY_HEADS, PAGE_TOKENS, heads_problem
from isobit.precision.quant_tensor import AMAX_FLOOR, E4M3

PART = 8192
FEW_PROGRAMS = 128  # which have a multiprocessor each on the cards that have most memory
FEW_SEQUENCES = 64  # whose parts have programs of their own in decode
_SMALLEST_SCALE = tl.constexpr(AMAX_FLOOR / 128)  # below every FP32 scale
_COLUMNS = MOST_QUERY_HEADS  # query heads of one decode program, padded
SCALES = {E4M3: torch.uint8, torch.int8: torch.float32}
"""The dtype of the scales of K and V, by that of K."""


@dataclass(frozen=True, slots=True)
class Form:
    """The build of the kernels for a format and a head size.  All but the tile affects only the
    time, as long as one instruction multiplies in decode and in prefill.
    """

    tile: int  # keys; divides a page
    decode_stages: int
    decode_registers: int | None
    """The most a thread may have, so that several programs fit a multiprocessor."""
    queries: int  # of one prefill program
    prefill_warps: int
    prefill_stages: int
    decode_warps: int = 4
    few_stages: int | None = None
    """Those of decode, if they are others, where each program has a multiprocessor to itself."""


@dataclass(frozen=True, slots=True)
class Build:
    """The kernels of a generation of cards."""

    form: Callable[[torch.dtype, int], Form]
    """Gives the form for the dtype of K and a head size."""
    is_portable: bool
    """Products are by ``mma.sync``, and E4M3 is bytes."""


@triton.jit
def _power_of_two(exponent):
    """Biased exponent -> 2^(exponent - 127) in FP32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _factor(scale, BYTES: tl.constexpr = False):
    """E8M0 byte or FP32 scale -> FP32.  BYTES: values of E4M3 are bytes, whose NaN is here."""
    if scale.dtype != tl.uint8:
        return scale
    elif BYTES:
        return tl.where(scale == 255, float("nan"), _power_of_two(scale))
    else:
        return _power_of_two(scale)


@triton.jit
def _at_least(scale):
    """V's FP32 scales.  Those of tokens that were never written are 0: their probability is 0, and
    is multiplied by numbers that have to be finite.  A NaN stays.
    """
    return tl.maximum(scale, _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log2(scale, BYTES: tl.constexpr):
    """V's scales, E8M0 bytes or FP32 -> their base-2 logarithms in FP32; BYTES as above."""
    if scale.dtype != tl.uint8:
        return tl.math.log2(_at_least(scale))
    elif BYTES:
        return tl.where(scale == 255, float("nan"), scale.to(tl.float32) - 127.0)
    else:
        return scale.to(tl.float32) - 127.0


@triton.jit
def _inverse(scale):
    """V's scales, E8M0 bytes or FP32 -> their inverses in FP32."""
    if scale.dtype == tl.uint8:
        return _power_of_two(254 - scale.to(tl.int32))
    else:
        return 1.0 / _at_least(scale)


@triton.jit
def _to_half(v):
    """E4M3, its bytes, or INT8 -> FP16, which is exact."""
    if v.dtype == tl.uint8:
        return decoded(v) * 256.0
    elif v.dtype == tl.int8:
        # The byte v + 128 below 0x64 is the FP16 1024 + 128 + v: three instructions for two
        # numbers, where the plain conversion takes seven.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, y;
                prmt.b32 x, $1, 0x64, 0x4140;
                xor.b32 x, x, 0x00800080;
                mov.b32 y, 0x64806480;
                sub.rn.f16x2 $0, x, y;
            }
            """,
            "=r,r",
            [v],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return v.to(tl.float16)


@triton.jit
def _multiplied(x):
    """Q or K as the tensor cores take them: bytes of E4M3 as FP16, 2^-8 of the numbers."""
    if x.dtype == tl.uint8:
        return decoded(x)
    else:
        return x


@triton.jit
def _sealed(x):
    """FP16 as it is, behind something that Triton does not see through: see the module."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], tl.float16, is_pure=False, pack=2
    )


@triton.jit
def _within(mask, d, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """A mask for vectors of D numbers whose ``d`` counts to WIDTH, a power of two, along the axis
    that is not AXIS.
    """
    if D == WIDTH:
        return mask
    else:
        return mask & tl.expand_dims(d < D, AXIS)


@triton.jit
def _partial_sums(x, TILE: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """(TILE, N) or (N, TILE) -> 32 partial sums a query, adding keys that differ in bit 3 and (of
    128) bit 6, which one thread holds.
    """
    if KEYS_FIRST:
        x = tl.sum(tl.reshape(x, [TILE // 16, 2, 8, N]), 1)
        if TILE == 128:
            x = tl.sum(tl.reshape(x, [2, 4, 8, N]), 0)
        return tl.reshape(x, [4, 8, N])
    else:
        x = tl.sum(tl.reshape(x, [N, TILE // 16, 2, 8]), 2)
        if TILE == 128:
            x = tl.sum(tl.reshape(x, [N, 2, 4, 8]), 1)
        return tl.reshape(x, [N, 4, 8])


@triton.jit
def _final_sum(x, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """32 partial sums a query -> (N,), halving one bit of the index at a time."""
    if KEYS_FIRST:
        x = tl.sum(tl.sum(tl.reshape(x, [2, 2, 8, N]), 0), 0)
        return tl.sum(tl.sum(tl.reshape(tl.sum(tl.reshape(x, [2, 4, N]), 0), [2, 2, N]), 0), 0)
    else:
        x = tl.sum(tl.sum(tl.reshape(x, [N, 2, 2, 8]), 1), 1)
        return tl.sum(tl.sum(tl.reshape(tl.sum(tl.reshape(x, [N, 2, 4]), 1), [N, 2, 2]), 1), 1)


@triton.jit
def _finite(m, WINDOW: tl.constexpr):
    """The maximum to subtract in exponents; under a window a query may have seen no key."""
    if WINDOW:
        return tl.where(m == -float("inf"), 0.0, m)
    else:
        return m


@triton.jit
def _weigh(
    qk, seen, q_scale, k_scale, v_scale, c, m, l, MASKED, TILE: tl.constexpr, N: tl.constexpr,
    AXIS: tl.constexpr, SCALED: tl.constexpr, BYTES: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """A tile's products q . k, of N queries and with the keys along AXIS -> p, the new maximum and
    sum, and the factor that the old ones decay by.
    """
    # Base-2 exponents s.  They include log2(s_v), so that p carries V's scale and the second
    # product takes V's values as they are; ``terms`` removes it from the sum.  A power of two
    # rounds nothing.
    if SCALED:
        k_factor = tl.expand_dims(_factor(k_scale, BYTES), 1 - AXIS)
        s = tl.math.fma(
            qk.to(tl.float32) * k_factor,
            tl.expand_dims(q_scale, AXIS),
            tl.expand_dims(_log2(v_scale, BYTES), 1 - AXIS),
        )
    else:
        s = qk
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    # BF16: s is the plain product here, and c comes in with the subtraction of the maximum.
    if SCALED:
        m_new = tl.maximum(m, tl.max(s, AXIS))
        finite = _finite(m_new, WINDOW)
        p = tl.math.exp2(s - tl.expand_dims(finite, AXIS))
        terms = p * tl.expand_dims(_inverse(v_scale), 1 - AXIS)
    else:
        m_new = tl.maximum(m, tl.max(s, AXIS) * c)
        finite = _finite(m_new, WINDOW)
        p = tl.math.exp2(tl.math.fma(s, c, -tl.expand_dims(finite, AXIS)))
        terms = p
    decay = tl.math.exp2(m - finite)
    if AXIS == 0:
        l = tl.math.fma(l, decay[None, None, :], _partial_sums(terms, TILE, N, True))
    else:
        l = tl.math.fma(l, decay[:, None, None], _partial_sums(terms, TILE, N, False))
    return p, m_new, l, decay


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first key that the query at a position sees; WINDOW is 0 where there is none."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return 0


@triton.jit
def _with_sink(o, m, l, SINKS, head, AXIS: tl.constexpr):
    """Add the sink of each query's head, if there are any; o has D along AXIS, or alone."""
    if SINKS is None:
        return o, m, l
    else:
        score = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, score)
        decay = tl.math.exp2(m - m_new)
        l = tl.math.fma(l, decay, tl.math.exp2(score - m_new))
        return o * (decay if AXIS is None else tl.expand_dims(decay, AXIS)), m_new, l


@triton.jit
def _decode_part(
    q, q_scale, K, K_SCALE, V, V_SCALE, table, g, c, start, end, first_seen,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, SEALS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys from ``start``, where a tile begins, to ``end`` of a sequence's pages, for N queries
    of a KV head that all see what is between ``first_seen`` and ``end``: the sums of V [WIDTH, N],
    the maximum and the sum.

    Keys or D are down and query heads across: [TILE, D] K times [D, N] Q, then [D, TILE] V^T times
    [TILE, N] P.  So the side of 64 rows that wgmma needs is full.
    """
    BYTES: tl.constexpr = K.dtype.element_ty == tl.uint8
    ZERO: tl.constexpr = None if D == WIDTH else 0.0
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, TILE)
    along = (d < D)[None, :] if D < WIDTH else None
    down = (d < D)[:, None] if D < WIDTH else None
    m = tl.full([N], -float("inf"), tl.float32)
    l = tl.zeros([4, 8, N], tl.float32)
    acc = tl.zeros([WIDTH, N], tl.float32)

    # ``page`` counts slabs [page, G]: one KV head of one page, PAGE tokens.
    if SCALED:
        page = tl.load(table + start // PAGE).to(tl.int64) * G + g
        rows = t if TILE == PAGE else start % PAGE + t
        next_k_scale = tl.load(K_SCALE + page * PAGE + rows)
        next_v_scale = tl.load(V_SCALE + page * PAGE + rows)
    # num_stages here is 5% faster than as a launch option.
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        page = tl.load(table + first // PAGE).to(tl.int64) * G + g
        k_scale = next_k_scale if SCALED else None
        v_scale = next_v_scale if SCALED else None
        if SCALED:
            # Scales are loaded one tile ahead, or the loop would stall.
            ahead = tl.load(table + tl.minimum(first + TILE, end - 1) // PAGE).to(tl.int64) * G + g
            rows = t if TILE == PAGE else (first + TILE) % PAGE + t
            next_k_scale = tl.load(K_SCALE + ahead * PAGE + rows)
            next_v_scale = tl.load(V_SCALE + ahead * PAGE + rows)
        rows = first % PAGE + t  # of the page, of which a tile may be a half
        k = tl.load(K + page * (PAGE * D) + rows[:, None] * D + d[None, :], mask=along, other=ZERO)
        # A tile is read whole, since pages hold finite numbers beyond the length; only the last
        # tile, and the first of a window, are masked.
        seen = (first + t)[:, None] < end
        masked = first + TILE > end
        if WINDOW:
            seen = seen & ((first + t)[:, None] >= first_seen)
            masked = masked | (first < first_seen)
        p, m, l, decay = _weigh(
            tl.dot(_multiplied(k), q), seen, q_scale, k_scale, v_scale, c, m, l, masked, TILE, N, 0,
            SCALED, BYTES, WINDOW
        )  # fmt: skip
        if SCALED:  # pages hold V as [D, token] already
            column = t if TILE == PAGE else rows
            at = V + page * (PAGE * D) + d[:, None] * PAGE + column[None, :]
            v = _to_half(tl.load(at, mask=down, other=ZERO))
            v = _sealed(v) if SEALS else v
            acc = tl.dot(v, p.to(tl.float16), acc * decay[None, :])
        else:
            at = V + page * (PAGE * D) + rows[:, None] * D + d[None, :]
            v = tl.load(at, mask=along, other=ZERO)
            acc = tl.dot(tl.trans(v), p.to(tl.bfloat16), acc * decay[None, :])
    return acc, m, _final_sum(l, N, True)


@triton.jit
def _decode_kernel(
    Q, Q_SCALE, K, K_SCALE, V, V_SCALE, SINKS, TABLE, LENGTH, O, LSE, PART_O, PART_M, PART_L, c,
    table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, SEALS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One program a KV head and sequence, or if PARTS is "apart" a part of it: the H / G query
    heads that share the KV head, padded to N columns.  Parts count from the first that holds a key
    the query sees; there is "one", or a program joins them "in order".
    """
    R: tl.constexpr = H // G
    g = tl.program_id(0)
    b = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(LENGTH + b)
    first_seen = _first_seen(length - 1, WINDOW)
    start = part * PART
    if WINDOW:
        start += first_seen // PART * PART
    if start >= length:
        return

    # Q of the group's heads is read once.  Columns beyond R repeat addresses, hold zeros and are
    # not stored.
    n = tl.arange(0, N)
    head = g * R + n % R
    valid = n < R
    d = tl.arange(0, WIDTH)
    table = TABLE + b * table_stride
    row = b * H + head
    stored = _within(valid[None, :], d, D, WIDTH, 1)
    q = _multiplied(tl.load(Q + row[None, :] * D + d[:, None], mask=stored, other=0.0))
    q_scale = tl.load(Q_SCALE + row, mask=valid, other=0.0) * c if SCALED else None
    first = tl.maximum(start, first_seen // TILE * TILE) if WINDOW else start
    if PARTS == "in order":
        acc = tl.zeros([WIDTH, N], tl.float32)
        m = tl.full([N], -float("inf"), tl.float32)
        total = tl.zeros([N], tl.float32)
        for begin in tl.range(start, length, PART):
            o, part_m, part_total = _decode_part(
                q, q_scale, K, K_SCALE, V, V_SCALE, table, g, c, tl.maximum(begin, first),
                tl.minimum(length, begin + PART), first_seen,
                G, D, WIDTH, PAGE, TILE, N, STAGES, SCALED, SEALS, WINDOW,
            )  # fmt: skip
            acc, m, total = _added(acc, m, total, o, part_m, part_total, 0)
    else:
        acc, m, total = _decode_part(
            q, q_scale, K, K_SCALE, V, V_SCALE, table, g, c, first,
            tl.minimum(length, start + PART), first_seen,
            G, D, WIDTH, PAGE, TILE, N, STAGES, SCALED, SEALS, WINDOW,
        )  # fmt: skip

    # Parts apart leave o, m and l in FP32, [B, parts, H], to ``_join_kernel``.
    if PARTS == "apart":
        part_row = (b.to(tl.int64) * tl.num_programs(2) + part) * H + head
        tl.store(PART_O + part_row[None, :] * D + d[:, None], acc, mask=stored)
        tl.store(PART_M + part_row, m, mask=valid)
        tl.store(PART_L + part_row, total, mask=valid)
    else:
        acc, m, total = _with_sink(acc, m, total, SINKS, head, 0)
        tl.store(
            O + row[None, :] * D + d[:, None],
            (acc * (1.0 / total)[None, :]).to(tl.bfloat16),
            mask=stored,
        )
        tl.store(LSE + row, m + tl.math.log2(total), mask=valid)


@triton.jit
def _join(o, m, l, part_o, part_m, part_l, AXIS: tl.constexpr):
    """Join a part to the earlier ones; o has D along AXIS, or alone."""
    m_new = tl.maximum(m, part_m)
    old = tl.math.exp2(m - m_new)
    new = tl.math.exp2(part_m - m_new)
    if AXIS is None:
        o = tl.math.fma(part_o, new, o * old)
    else:
        by_query = tl.broadcast_to(tl.expand_dims(new, AXIS), part_o.shape)
        o = tl.math.fma(part_o, by_query, o * tl.expand_dims(old, AXIS))
    return o, m_new, tl.math.fma(part_l, new, l * old)


@triton.jit
def _added(o, m, l, part_o, part_m, part_l, AXIS: tl.constexpr):
    """``_join``, or the part as it is where no key was seen before: not even a zero's sign changes
    then.
    """
    joined_o, joined_m, joined_l = _join(o, m, l, part_o, part_m, part_l, AXIS)
    is_first = m == -float("inf")
    o = tl.where(tl.expand_dims(is_first, AXIS), part_o, joined_o)
    return o, tl.where(is_first, part_m, joined_m), tl.where(is_first, part_l, joined_l)


@triton.jit
def _join_kernel(
    PART_O, PART_M, PART_L, SINKS, LENGTH, O, LSE, max_parts, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program a query head and sequence: its parts in ascending order."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = None if D == WIDTH else d < D
    ZERO: tl.constexpr = None if D == WIDTH else 0.0
    length = tl.load(LENGTH + b)
    parts = tl.cdiv(length, PART) - _first_seen(length - 1, WINDOW) // PART
    row = b * max_parts * H + h
    o = tl.load(PART_O + row * D + d, mask=inside, other=ZERO)
    m = tl.load(PART_M + row)
    l = tl.load(PART_L + row)
    for _ in range(1, parts):
        row += H
        part_o = tl.load(PART_O + row * D + d, mask=inside, other=ZERO)
        o, m, l = _join(o, m, l, part_o, tl.load(PART_M + row), tl.load(PART_L + row), None)
    o, m, l = _with_sink(o, m, l, SINKS, h, None)
    o = (o * (1.0 / l)).to(tl.bfloat16)
    tl.store(O + (b * H + h) * D + d, o, mask=inside)
    tl.store(LSE + b * H + h, m + tl.math.log2(l))


@triton.jit
def _prefill_part(
    q, q_scale, K, K_SCALE, V, V_SCALE, c, start, part_end, first_position, position, length,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NQ: tl.constexpr,
    STAGES: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys of one part from tile ``start`` on, for NQ queries: their maximum, sum and
    accumulator.

    K, V and their bytes point at the sequence's first token and the KV head, so token j is at j (G
    D), its byte at j G.  K is read transposed: [NQ, D] Q times [D, TILE] K.
    """
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, TILE)
    m = tl.full([NQ], -float("inf"), tl.float32)
    l = tl.zeros([NQ, 4, 8], tl.float32)
    acc = tl.zeros([NQ, WIDTH], tl.float32)
    # All queries of the block see the whole of a tile that ends at or before its first position.
    unmasked_end = tl.minimum(part_end, tl.maximum(start, (first_position + 1) // TILE * TILE))
    if WINDOW:
        last_window = _first_seen(first_position + NQ - 1, WINDOW)
    # Scale bytes are loaded one tile ahead: single bytes cannot be copied asynchronously, and
    # waiting for them costs a tenth of the time.
    BYTES: tl.constexpr = K.dtype.element_ty == tl.uint8
    ZERO: tl.constexpr = None if D == WIDTH else 0.0
    along = (d < D)[None, :] if D < WIDTH else None
    down = (d < D)[:, None] if D < WIDTH else None
    AHEAD: tl.constexpr = SCALED and (BYTES or K_SCALE.dtype.element_ty == tl.float32)
    if SCALED:
        next_k_scale = tl.load(K_SCALE + tl.minimum(start + t, length - 1) * G)
        next_v_scale = tl.load(V_SCALE + tl.minimum(start + t, length - 1) * G)

    # Whole tiles, masked only where a window begins.
    for first in tl.range(start, unmasked_end, TILE, num_stages=STAGES):
        j = first + t
        k_scale = next_k_scale if SCALED else None
        v_scale = next_v_scale if SCALED else None
        if SCALED:
            ahead = tl.minimum(j + TILE, length - 1)
            next_k_scale = tl.load(K_SCALE + ahead * G)
            next_v_scale = tl.load(V_SCALE + ahead * G)
        k = tl.load(K + j[None, :] * (G * D) + d[:, None], mask=down, other=ZERO)
        v = tl.load(V + j[:, None] * (G * D) + d[None, :], mask=along, other=ZERO)
        p, m, l, decay = _weigh(
            tl.dot(q, _multiplied(k)),
            (j[None, :] > position[:, None] - WINDOW) if WINDOW else None,
            q_scale, k_scale, v_scale, c, m, l,
            (first < last_window) if WINDOW else False, TILE, NQ, 1, SCALED, BYTES, WINDOW
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])

    # The tiles on the diagonal and a last short one: three at most, not worth a pipeline.  V is
    # zero beyond the length because a masked key's weight is multiplied.
    for first in tl.range(unmasked_end, part_end, TILE, num_stages=1):
        j = first + t
        inside = j < length
        # As above, or Triton has every thread take the logarithms of 32 keys and, below Hopper,
        # sees that P comes from bytes.
        if AHEAD:
            k_scale = next_k_scale
            v_scale = next_v_scale
            ahead = tl.minimum(j + TILE, length - 1)
            next_k_scale = tl.load(K_SCALE + ahead * G)
            next_v_scale = tl.load(V_SCALE + ahead * G)
        else:
            k_scale = tl.load(K_SCALE + j * G, mask=inside, other=127) if SCALED else None
            v_scale = tl.load(V_SCALE + j * G, mask=inside, other=127) if SCALED else None
        k = tl.load(
            K + j[None, :] * (G * D) + d[:, None],
            mask=_within(inside[None, :], d, D, WIDTH, 1),
            other=0.0,
        )
        v = tl.load(
            V + j[:, None] * (G * D) + d[None, :],
            mask=_within(inside[:, None], d, D, WIDTH, 0),
            other=0.0,
        )
        seen = j[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (j[None, :] > position[:, None] - WINDOW)
        p, m, l, decay = _weigh(
            tl.dot(q, _multiplied(k)), seen, q_scale, k_scale, v_scale, c, m, l, True, TILE, NQ, 1,
            SCALED, BYTES, WINDOW,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return m, _final_sum(l, NQ, False), acc


@triton.jit
def _prefill_kernel(
    Q, Q_SCALE, K, K_SCALE, V, V_SCALE, SINKS, Q_START, Q_COUNT, K_START, LENGTH, O, LSE, PART_O,
    PART_M, PART_L, c, start,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, NQ: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program NQ consecutive queries of one head; the queries are the last Q_COUNT of LENGTH
    tokens (all of them, in training).

    Each part has a launch, beginning at key ``start``.  PART_O, PART_M and PART_L hold what is
    joined so far.
    """
    h = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    b = tl.program_id(2)
    g = h // (H // G)
    count = tl.load(Q_COUNT + b)
    if block * NQ >= count:
        return
    length = tl.load(LENGTH + b)

    # Positions count from the sequence's start; keys before ``first_seen`` and from ``end`` on are
    # seen by no query here.
    first_position = length - count + block * NQ
    first_seen = _first_seen(first_position, WINDOW)
    end = tl.minimum(length, first_position + NQ)
    if start >= end:
        return
    first_tile = start
    if WINDOW:
        if start + PART <= first_seen:
            return
        first_tile = tl.maximum(start, first_seen // TILE * TILE)
    k_start = tl.load(K_START + b).to(tl.int64)
    query = block * NQ + tl.arange(0, NQ)
    valid = query < count
    position = length - count + query
    d = tl.arange(0, WIDTH)
    row = ((tl.load(Q_START + b) + query).to(tl.int64)) * H + h  # of [T, H]
    stored = _within(valid[:, None], d, D, WIDTH, 0)
    q = _multiplied(tl.load(Q + row[:, None] * D + d[None, :], mask=stored, other=0.0))
    q_scale = tl.load(Q_SCALE + row, mask=valid, other=0.0) * c if SCALED else None

    K += (k_start * G + g) * D
    V += (k_start * G + g) * D
    if SCALED:
        K_SCALE += k_start * G + g
        V_SCALE += k_start * G + g
    m, total, acc = _prefill_part(
        q, q_scale, K, K_SCALE, V, V_SCALE, c, first_tile, tl.minimum(end, start + PART),
        first_position, position, length,
        G, D, WIDTH, TILE, NQ, STAGES, SCALED, WINDOW,
    )  # fmt: skip
    place = row[:, None] * D + d[None, :]

    # Join it to the parts of earlier launches; the last part goes on to divide.
    if SPLIT:
        if start > first_seen:
            before = tl.load(PART_O + place, mask=stored, other=0.0)
            before_m = tl.load(PART_M + row, mask=valid, other=0.0)
            before_total = tl.load(PART_L + row, mask=valid, other=1.0)
            joined, joined_m, joined_total = _join(before, before_m, before_total, acc, m, total, 1)
            # A query before this part sees none of its keys: its m is -inf.
            reached = position >= start
            acc = tl.where(reached[:, None], joined, before)
            m = tl.where(reached, joined_m, before_m)
            total = tl.where(reached, joined_total, before_total)
        if end > start + PART:
            tl.store(PART_O + place, acc, mask=stored)
            tl.store(PART_M + row, m, mask=valid)
            tl.store(PART_L + row, total, mask=valid)
            return
    acc, m, total = _with_sink(acc, m, total, SINKS, h, 1)
    tl.store(O + place, (acc * (1.0 / total)[:, None]).to(tl.bfloat16), mask=stored)
    tl.store(LSE + row, m + tl.math.log2(total), mask=valid)


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """K and V pages of one layer (layouts above); without scales in the BF16 form."""

    keys: torch.Tensor
    key_scales: torch.Tensor | None
    values: torch.Tensor
    value_scales: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """K and V of packed sequences (layouts above); without scales in the BF16 form."""

    keys: torch.Tensor
    key_scales: torch.Tensor | None
    values: torch.Tensor
    value_scales: torch.Tensor | None


def _portable(dtype: torch.dtype, dim: int) -> Form:
    """Tiles that every card since Ampere has the shared memory for, and registers where possible:
    the tensor cores take Q and the sums of a head from registers.  Tiles of 128 keys of INT8 spill
    some in prefill, which takes 1.18 of the time, and leave decode 0.6 to 0.7 of its own.
    """
    if dim > 128:
        return Form(
            tile=64, decode_stages=2, decode_registers=None, queries=32, prefill_warps=8,
            prefill_stages=2,
        )  # fmt: skip
    is_narrow = dim <= 64
    if dtype == torch.int8:
        return Form(
            tile=128, decode_stages=4, decode_registers=None, queries=128 if is_narrow else 64,
            prefill_warps=8 if is_narrow else 4, prefill_stages=2,
        )  # fmt: skip
    few_warps = dtype == torch.bfloat16 and not is_narrow
    return Form(
        tile=64, decode_stages=6 if dtype == E4M3 else 2 if few_warps else 3,
        decode_registers=None, queries=64 if is_narrow else 128,
        prefill_warps=4 if is_narrow else 8, prefill_stages=3 if dim == 64 else 2,
        decode_warps=2 if few_warps else 4,
    )  # fmt: skip


PORTABLE = Build(_portable, is_portable=True)


def decode_attention(
    queries: torch.Tensor,
    query_scales: torch.Tensor | None,
    pages: PagedKeys,
    table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    build: Build = PORTABLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query a sequence: E4M3 or INT8 [B, H, D] with FP32 scales [B, H], or BF16; table int32
    [B, pages], lengths int32 [B], at most max_length; a query sees the last ``window`` keys, or
    all; ``sinks`` [H].

    -> output BF16 [B, H, D] and log-sum-exp (base 2) FP32 [B, H].  The launch depends on B,
    max_length and the window alone, so it can be captured.
    """
    batch, heads, dim = queries.shape
    kv_heads = pages.keys.shape[1]
    form = checked(queries, query_scales, pages, build)
    parts = triton.cdiv(max_length, PART)
    if window is not None:
        parts = min(parts, triton.cdiv(window - 1, PART) + 1)
    apart = parts > 1 and batch <= FEW_SEQUENCES
    output = torch.empty((batch, heads, dim), dtype=torch.bfloat16, device=queries.device)
    log_sum_exp = torch.empty((batch, heads), dtype=torch.float32, device=queries.device)
    part_output, part_max, part_sum = output, log_sum_exp, log_sum_exp  # unused but by parts apart
    if apart:
        part_output = log_sum_exp.new_empty((batch, parts, heads, dim))
        part_max, part_sum = log_sum_exp.new_empty((2, batch, parts, heads))
    (q, k, v), c = as_read(build, queries, pages.keys, pages.values)
    width, stages = triton.next_power_of_2(dim), form.decode_stages
    programs = parts if apart else 1  # beyond a sequence's end they return at once
    if form.few_stages is not None and kv_heads * batch * programs <= FEW_PROGRAMS:
        stages = form.few_stages
    _decode_kernel[(kv_heads, batch, programs)](
        q, query_scales, k, pages.key_scales, v, pages.value_scales, sinks,
        table, lengths, output, log_sum_exp,
        part_output, part_max, part_sum, c, table.stride(0),
        heads, kv_heads, dim, width, PAGE_TOKENS, form.tile, PART, _COLUMNS, stages,
        "one" if parts == 1 else "apart" if apart else "in order",
        query_scales is not None, build.is_portable, window or 0,
        num_warps=form.decode_warps, num_stages=stages, maxnreg=form.decode_registers,
        enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        _join_kernel[(heads, batch)](
            part_output, part_max, part_sum, sinks, lengths, output, log_sum_exp, parts, heads, dim,
            width, PART, window or 0, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return output, log_sum_exp


def prefill_attention(
    queries: torch.Tensor,
    query_scales: torch.Tensor | None,
    keys: PackedKeys,
    query_starts: torch.Tensor,
    query_counts: torch.Tensor,
    key_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_count: int,
    max_length: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    build: Build = PORTABLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed queries, E4M3 or INT8 [T, H, D] with FP32 scales [T, H], or BF16: of sequence b the
    last query_counts[b] of lengths[b] tokens; each sees the last ``window`` keys up to its own, or
    all; ``sinks`` [H].

    query_starts and key_starts (int32 [B]) are the first rows of a sequence's queries and keys. ->
    output BF16 [T, H, D] and log-sum-exp (base 2) FP32 [T, H].
    """
    tokens, heads, dim = queries.shape
    kv_heads = keys.keys.shape[1]
    form = checked(queries, query_scales, keys, build)
    split = max_length > PART
    output = torch.empty((tokens, heads, dim), dtype=torch.bfloat16, device=queries.device)
    log_sum_exp = torch.empty((tokens, heads), dtype=torch.float32, device=queries.device)
    part_output, part_max, part_sum = output, log_sum_exp, log_sum_exp  # unused with one part
    if split:
        part_output = log_sum_exp.new_empty((tokens, heads, dim))
        part_max, part_sum = log_sum_exp.new_empty((2, tokens, heads))
    (q, k, v), c = as_read(build, queries, keys.keys, keys.values)
    # A launch reads what the one before it wrote: the stream keeps them in order.
    for start in range(0, max_length, PART):
        _prefill_kernel[(heads, triton.cdiv(max_count, form.queries), lengths.numel())](
            q, query_scales, k, keys.key_scales, v, keys.value_scales, sinks,
            query_starts, query_counts, key_starts,
            lengths, output, log_sum_exp, part_output, part_max, part_sum, c, start,
            heads, kv_heads, dim, triton.next_power_of_2(dim), form.tile, PART, form.queries,
            form.prefill_stages, split, query_scales is not None, window or 0,
            num_warps=form.prefill_warps, num_stages=form.prefill_stages, enable_fp_fusion=False,
        )  # fmt: skip
    return output, log_sum_exp


def checked(
    queries: torch.Tensor,
    query_scales: torch.Tensor | None,
    keys: PagedKeys | PackedKeys,
    build: Build,
) -> Form:
    """The form of these tensors; ValueError where there is none."""
    scale = SCALES.get(queries.dtype)
    wanted = [None if scale is None else torch.float32, scale, scale]
    scales = query_scales, keys.key_scales, keys.value_scales
    if [None if x is None else x.dtype for x in scales] != wanted or (
        keys.keys.dtype != queries.dtype
    ):
        raise ValueError(
            f"queries of {queries.dtype} over keys of {keys.keys.dtype}: attention on a GPU takes "
            "E4M3 with scales and bytes, INT8 with FP32 scales, or BF16 without"
        )
    _, heads, dim = queries.shape
    problem = heads_problem(heads, keys.keys.shape[1], dim)
    if problem is not None:
        raise ValueError(problem)
    return build.form(queries.dtype, dim)


def as_read(build: Build, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """Q, K and V as the kernels read them, and c, which takes back what bytes are too small by."""
    c = math.log2(math.e) / tensors[0].shape[-1] ** 0.5
    if not build.is_portable or tensors[0].dtype != E4M3:
        return list(tensors), c
    read = [x.view(torch.uint8) if x.dtype == E4M3 else x for x in tensors]
    return read, c * PRODUCT_SCALE.value
