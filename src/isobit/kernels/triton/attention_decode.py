"""Attention of one query a sequence, over pages (``isobit.kernels.triton.attention``).

Up to ``MOST_APART`` parts of all sequences have programs of their own, and a second kernel joins
them; where there are more, one program takes a sequence's parts in order.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.triton import attention
from isobit.kernels.triton.attention import PORTABLE, Build, PagedKeys, as_read, checked
from isobit.kernels.triton.attention_tile import (
    _added,
    _final_sum,
    _first_seen,
    _join,
    _multiplied,
    _weigh,
    _with_sink,
    _within,
)
from isobit.kernels.triton.e4m3 import decoded
from isobit.kernels.triton.heads import MOST_APART, MOST_QUERY_HEADS, PAGE_TOKENS

FEW_PROGRAMS = 128  # which have a multiprocessor each on the cards that have most memory
_COLUMNS = MOST_QUERY_HEADS  # query heads of one program, padded


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
def _sealed(x):
    """FP16 as it is, behind something that Triton does not see through: see the module."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], tl.float16, is_pure=False, pack=2
    )


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
    parts = triton.cdiv(max_length, attention.PART)
    if window is not None:
        parts = min(parts, triton.cdiv(window - 1, attention.PART) + 1)
    apart = parts > 1 and batch * parts <= MOST_APART
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
        heads, kv_heads, dim, width, PAGE_TOKENS, form.tile, attention.PART, _COLUMNS, stages,
        "one" if parts == 1 else "apart" if apart else "in order",
        query_scales is not None, build.is_portable, window or 0,
        num_warps=form.decode_warps, num_stages=stages, maxnreg=form.decode_registers,
        enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        _join_kernel[(heads, batch)](
            part_output, part_max, part_sum, sinks, lengths, output, log_sum_exp, parts, heads, dim,
            width, attention.PART, window or 0, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return output, log_sum_exp
