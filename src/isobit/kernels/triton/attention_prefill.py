"""Attention of many queries a sequence, packed: prompts, and the forward of training
(``isobit.kernels.triton.attention``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton import attention
from isobit.kernels.triton.attention import PORTABLE, Build, PackedKeys, as_read, checked
from isobit.kernels.triton.attention_tile import (
    _added,
    _final_sum,
    _first_seen,
    _multiplied,
    _weigh,
    _with_sink,
    _within,
)


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
        # Ahead here too, or Triton has every thread take the logarithms of 32 keys and, below
        # Hopper, sees that P comes from bytes.
        k_scale = next_k_scale if SCALED else None
        v_scale = next_v_scale if SCALED else None
        if SCALED:
            ahead = tl.minimum(j + TILE, length - 1)
            next_k_scale = tl.load(K_SCALE + ahead * G)
            next_v_scale = tl.load(V_SCALE + ahead * G)
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
    Q, Q_SCALE, K, K_SCALE, V, V_SCALE, SINKS, Q_START, Q_COUNT, K_START, LENGTH, O, LSE, c,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, NQ: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program NQ consecutive queries of one head; the queries are the last Q_COUNT of LENGTH
    tokens (all of them, in training).  SPLIT: there may be several parts.
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
    first_tile = first_seen // TILE * TILE
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
    if SPLIT:
        acc = tl.zeros([NQ, WIDTH], tl.float32)
        m = tl.full([NQ], -float("inf"), tl.float32)
        total = tl.zeros([NQ], tl.float32)
        for begin in tl.range(first_seen // PART * PART, end, PART):
            part_m, part_total, o = _prefill_part(
                q, q_scale, K, K_SCALE, V, V_SCALE, c, tl.maximum(begin, first_tile),
                tl.minimum(end, begin + PART), first_position, position, length,
                G, D, WIDTH, TILE, NQ, STAGES, SCALED, WINDOW,
            )  # fmt: skip
            if begin <= first_seen:  # not added to zeros, for which registers would be kept
                acc, m, total = o, part_m, part_total
            else:
                added, added_m, added_total = _added(acc, m, total, o, part_m, part_total, 1)
                reached = position >= begin  # a query before this part sees none of its keys
                acc = tl.where(reached[:, None], added, acc)
                m = tl.where(reached, added_m, m)
                total = tl.where(reached, added_total, total)
    else:
        m, total, acc = _prefill_part(
            q, q_scale, K, K_SCALE, V, V_SCALE, c, first_tile, end, first_position, position,
            length, G, D, WIDTH, TILE, NQ, STAGES, SCALED, WINDOW,
        )  # fmt: skip
    acc, m, total = _with_sink(acc, m, total, SINKS, h, 1)
    tl.store(
        O + row[:, None] * D + d[None, :],
        (acc * (1.0 / total)[:, None]).to(tl.bfloat16),
        mask=stored,
    )
    tl.store(LSE + row, m + tl.math.log2(total), mask=valid)


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
    output = torch.empty((tokens, heads, dim), dtype=torch.bfloat16, device=queries.device)
    log_sum_exp = torch.empty((tokens, heads), dtype=torch.float32, device=queries.device)
    (q, k, v), c = as_read(build, queries, keys.keys, keys.values)
    _prefill_kernel[(heads, triton.cdiv(max_count, form.queries), lengths.numel())](
        q, query_scales, k, keys.key_scales, v, keys.value_scales, sinks, query_starts,
        query_counts, key_starts, lengths, output, log_sum_exp, c,
        heads, kv_heads, dim, triton.next_power_of_2(dim), form.tile, attention.PART,
        form.queries, form.prefill_stages, max_length > attention.PART, query_scales is not None,
        window or 0,
        num_warps=form.prefill_warps, num_stages=form.prefill_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return output, log_sum_exp
