"""The backward of causal attention on every card since Ampere: two kernels without atomics, which
repeat their bits.

Q, K and V are the dequantised values (E4M3 times a power of two is exact in BF16), the output O and
the base-2 log-sum-exp L those of the forward.  With c = log2(e) / sqrt(D):

    P  = 2^(c Q K^T - L)          delta = rowsum(dO * O)
    dS = P * (dO V^T - delta)     dV = P^T dO     dK = dS^T Q / sqrt(D)     dQ = dS K / sqrt(D)

Products are of BF16 numbers, summed in FP32; P and dS are rounded to BF16 as operands.  The keys'
kernel owns keys and walks the queries that see them, through all query heads of the KV head in
order; the queries' kernel owns queries and walks the keys that they see.  So every sum has one
order, which depends on the sequence alone, at the price of 7 products instead of the 5 of a kernel
that adds dQ up with atomics.

In INT8 the operands Q and K are the integers, so that the scores are the forward's, to which L
belongs.  FP32 scales multiply Q K^T by row and by column, and dS before it is rounded.  V times its
scale is rounded to BF16.

A sink is a term of L alone, and its gradient is -sum of 2^(z log2(e) - L) delta over the queries,
in FP32: each program leaves that of a block of tokens of one head (``add_block_sums``).

With a sliding window w, w queries see a key, from its own position on, and neither kernel walks
further.

Tiles count from the sequence's start.  So that kernels read whole tiles, a first one copies Q, K, V
and dO in BF16 to [head, padded token, ROW], where sequences begin at multiples of BLOCK rows, ROW
is D or the next power of two, and the padding is zeros (with a log-sum-exp of +inf, hence P = 0):
2 (2H + 2G) ROW bytes a token during the call.  A NaN reaches no other sequence.

A program holds what it owns, and its sums, in registers: ``mma.sync`` multiplies nothing else.
That bounds its rows, and within 99 KiB of shared memory the tiles that it walks are 32 or 64 rows.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.attention import PORTABLE, Build, PackedKeys, as_read, checked
from isobit.kernels.triton.attention_tile import (
    _factor,
    _within,
)
from isobit.kernels.triton.device_functions import add_block_sums
from isobit.kernels.triton.e4m3 import decoded

GROUP = tl.constexpr(64)  # rows whose numbers lie together
BLOCK = tl.constexpr(128)  # to multiples of which sequences are padded


@triton.jit
def _unscaled(x):
    """Values of 8 bits, E4M3 perhaps as bytes, -> FP32."""
    if x.dtype == tl.uint8:
        return decoded(x).to(tl.float32) * 256.0
    else:
        return x.to(tl.float32)


@triton.jit
def _prepare_kernel(
    Q, Q_SCALE, K, K_SCALE, V, V_SCALE, O, LSE, DO, START, LENGTH, PADDED_START, Q_OUT, K_OUT,
    V_OUT, DO_OUT, STATS, K_SCALE_OUT, padded_tokens,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program GROUP tokens of one head of Q, or of K and V: padded copies in BF16 [head, padded
    token, ROW], and the queries' log-sum-exp and delta.  Padding up to the next multiple of BLOCK
    rows is written too: zeros, by the masks' ``other``.  With K_SCALE_OUT [KV head, padded token]
    the copies of Q and K are integers, and Q's scales are the third of the WIDTH / GROUP stats.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * GROUP
    b = tl.program_id(2)
    length = tl.load(LENGTH + b)
    if first >= tl.cdiv(length, BLOCK) * BLOCK:
        return
    token = first + tl.arange(0, GROUP)
    inside = token < length
    d = tl.arange(0, ROW)
    BYTES: tl.constexpr = Q.dtype.element_ty == tl.uint8
    row = tl.load(START + b).to(tl.int64) + token
    padded_row = tl.load(PADDED_START + b).to(tl.int64) + token
    if head < H:
        # ``at`` is the row in [T, H], ``to`` the row in [H, padded token].
        at = row * H + head
        to = head * padded_tokens.to(tl.int64) + padded_row
        wide = at[:, None] * D + d[None, :]
        q = tl.load(Q + wide, mask=_within(inside[:, None], d, D, ROW, 0), other=0.0)
        if Q_SCALE is not None:
            q_scale = tl.load(Q_SCALE + at, mask=inside, other=0.0)
            if K_SCALE_OUT is None:
                q = (_unscaled(q) * q_scale[:, None]).to(tl.bfloat16)
            else:
                q = q.to(tl.bfloat16)
        tl.store(Q_OUT + to[:, None] * ROW + d[None, :], q)
        d_output = tl.load(DO + wide, mask=_within(inside[:, None], d, D, ROW, 0), other=0.0)
        tl.store(DO_OUT + to[:, None] * ROW + d[None, :], d_output)
        output = tl.load(O + wide, mask=_within(inside[:, None], d, D, ROW, 0), other=0.0)
        delta = tl.sum(d_output.to(tl.float32) * output.to(tl.float32), 1)
        lse = tl.load(LSE + at, mask=inside, other=float("inf"))
        # Of each GROUP rows first the log-sum-exps, then the deltas: WIDTH numbers, one copy.
        stats = STATS + to // GROUP * WIDTH + to % GROUP
        tl.store(stats, lse)
        tl.store(stats + GROUP, delta)
        if K_SCALE_OUT is not None:
            tl.store(stats + 2 * GROUP, q_scale)
    else:
        at = row * G + head - H
        to = (head - H) * padded_tokens.to(tl.int64) + padded_row
        wide = at[:, None] * D + d[None, :]
        k = tl.load(K + wide, mask=_within(inside[:, None], d, D, ROW, 0), other=0.0)
        v = tl.load(V + wide, mask=_within(inside[:, None], d, D, ROW, 0), other=0.0)
        if K_SCALE is not None:
            k_scale = _factor(tl.load(K_SCALE + at, mask=inside, other=0), BYTES)
            v_scale = _factor(tl.load(V_SCALE + at, mask=inside, other=0), BYTES)[:, None]
            if K_SCALE_OUT is None:
                k = (_unscaled(k) * k_scale[:, None]).to(tl.bfloat16)
            else:
                k = k.to(tl.bfloat16)
                tl.store(K_SCALE_OUT + to, k_scale)
            v = (v.to(tl.float32) * v_scale).to(tl.bfloat16)
        tl.store(K_OUT + to[:, None] * ROW + d[None, :], k)
        tl.store(V_OUT + to[:, None] * ROW + d[None, :], v)


@triton.jit
def _seen(key, query, WINDOW: tl.constexpr):
    """Whether queries see keys, from the positions of both."""
    seen = key <= query
    if WINDOW:
        seen = seen & (key > query - WINDOW)
    return seen


@triton.jit
def _keys_kernel(
    Q, K, V, DO, STATS, K_SCALE, DK, DV, START, LENGTH, PADDED_START, padded_tokens, c, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys of one KV head, over the queries of all heads that see them, QUERIES
    at once.

    Keys are down and queries across: S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are the
    left operands of dV = P^T dO and dK = dS^T Q.
    """
    g = tl.program_id(0)
    b = tl.program_id(1)
    first = tl.program_id(2) * KEYS
    length = tl.load(LENGTH + b)
    if first >= length:
        return
    R: tl.constexpr = H // G
    d = tl.arange(0, ROW)
    i = tl.arange(0, QUERIES)
    key = first + tl.arange(0, KEYS)
    start = tl.load(PADDED_START + b).to(tl.int64)
    own = g.to(tl.int64) * padded_tokens + start + key  # rows of a copy
    k = tl.load(K + own[:, None] * ROW + d[None, :])
    v = tl.load(V + own[:, None] * ROW + d[None, :])
    factor = c
    if K_SCALE is not None:
        factor = (c * tl.load(K_SCALE + own))[:, None]
    begin = first // QUERIES * QUERIES
    end = length
    if WINDOW:
        end = tl.minimum(end, first + KEYS + WINDOW - 1)
    dk = tl.zeros([KEYS, ROW], tl.float32)
    dv = tl.zeros([KEYS, ROW], tl.float32)
    for r in range(R):
        head_row = (g * R + r).to(tl.int64) * padded_tokens + start
        for walked in tl.range(begin, end, QUERIES, num_stages=STAGES):
            row = head_row + walked
            place = (row + i)[:, None] * ROW + d[None, :]
            q = tl.load(Q + place)
            do = tl.load(DO + place)
            stats = STATS + row // GROUP * WIDTH + row % GROUP + i
            s = tl.dot(k, tl.trans(q)) * factor
            if K_SCALE is not None:
                q_scale = tl.load(stats + 2 * GROUP)[None, :]
                s *= q_scale
            p = tl.math.exp2(s - tl.load(stats)[None, :])
            p = tl.where(_seen(key[:, None], (walked + i)[None, :], WINDOW), p, 0.0)
            dv = tl.dot(p.to(tl.bfloat16), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - tl.load(stats + GROUP)[None, :])
            if K_SCALE is not None:  # Q's integers lack their scales
                ds *= q_scale
            dk = tl.dot(ds.to(tl.bfloat16), q, dk)

    # dS^T Q lacks the 1 / sqrt(D) of the scores.
    at = ((tl.load(START + b).to(tl.int64) + key) * G + g)[:, None] * D + d[None, :]
    inside = _within((key < length)[:, None], d, D, ROW, 0)
    tl.store(DK + at, (dk * scale).to(tl.bfloat16), mask=inside)
    tl.store(DV + at, dv.to(tl.bfloat16), mask=inside)


@triton.jit
def _queries_kernel(
    Q, K, V, DO, STATS, K_SCALE, DQ, START, LENGTH, PADDED_START, padded_tokens, c, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dQ of QUERIES queries of one head, over the keys that they see, KEYS at once."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * QUERIES  # the longest walk first
    length = tl.load(LENGTH + b)
    if first >= length:
        return
    d = tl.arange(0, ROW)
    j = tl.arange(0, KEYS)
    query = first + tl.arange(0, QUERIES)
    start = tl.load(PADDED_START + b).to(tl.int64)
    own = h.to(tl.int64) * padded_tokens + start + query
    q = tl.load(Q + own[:, None] * ROW + d[None, :])
    do = tl.load(DO + own[:, None] * ROW + d[None, :])
    stats = STATS + own // GROUP * WIDTH + own % GROUP
    lse = tl.load(stats)[:, None]
    delta = tl.load(stats + GROUP)[:, None]
    factor = c
    if K_SCALE is not None:
        factor = (c * tl.load(stats + 2 * GROUP))[:, None]
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
    head_row = (h // (H // G)).to(tl.int64) * padded_tokens + start
    dq = tl.zeros([QUERIES, ROW], tl.float32)
    for walked in tl.range(begin, tl.minimum(length, first + QUERIES), KEYS, num_stages=STAGES):
        row = head_row + walked
        place = (row + j)[:, None] * ROW + d[None, :]
        k = tl.load(K + place)
        v = tl.load(V + place)
        s = tl.dot(q, tl.trans(k)) * factor
        if K_SCALE is not None:
            k_scale = tl.load(K_SCALE + row + j)[None, :]
            s *= k_scale
        p = tl.math.exp2(s - lse)
        p = tl.where(_seen((walked + j)[None, :], query[:, None], WINDOW), p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta)
        if K_SCALE is not None:  # K's integers lack their scales
            ds *= k_scale
        dq = tl.dot(ds.to(tl.bfloat16), k, dq)

    # dS K lacks the 1 / sqrt(D) of the scores.
    at = ((tl.load(START + b).to(tl.int64) + query) * H + h)[:, None] * D + d[None, :]
    inside = _within((query < length)[:, None], d, D, ROW, 0)
    tl.store(DQ + at, (dq * scale).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _sinks_kernel(
    O, DO, LSE, SINKS, SUMS, tokens,
    H: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program N tokens of one head: their part of the sink's gradient, to SUMS [blocks, H]."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    token = block.to(tl.int64) * N + tl.arange(0, N)
    inside = token < tokens
    d = tl.arange(0, ROW)
    row = token * H + h
    wide = row[:, None] * D + d[None, :]
    read = _within(inside[:, None], d, D, ROW, 0)
    d_output = tl.load(DO + wide, mask=read, other=0.0).to(tl.float32)
    delta = tl.sum(d_output * tl.load(O + wide, mask=read, other=0.0).to(tl.float32), 1)
    score = tl.load(SINKS + h).to(tl.float32) * 1.4426950408889634
    weight = tl.math.exp2(score - tl.load(LSE + row, mask=inside, other=float("inf")))
    tl.store(SUMS + block * H + h, -tl.sum(weight * delta, 0))


def sinks_backward(
    sinks: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    d_output: torch.Tensor,
    grad: torch.Tensor,
) -> None:
    """Add the gradient of the sinks [H] to ``grad``, FP32 [H]; the others as above, contiguous."""
    tokens, heads, dim = output.shape
    rows = GROUP.value
    blocks = triton.cdiv(tokens, rows)
    sums = log_sum_exp.new_empty((blocks, heads))
    _sinks_kernel[(blocks, heads)](
        output, d_output, log_sum_exp, sinks, sums, tokens, heads, dim, triton.next_power_of_2(dim),
        rows, num_warps=4,
    )  # fmt: skip
    add_block_sums(sums, grad)


@dataclass(frozen=True, slots=True)
class Copies:
    """What the kernels walk: sequences on whole blocks."""

    queries: torch.Tensor  # BF16 [H * padded tokens, ROW], like d_output
    keys: torch.Tensor  # BF16 [G * padded tokens, ROW], like values
    values: torch.Tensor
    d_output: torch.Tensor
    key_scales: torch.Tensor | None
    """FP32 [G * padded tokens] in INT8, where the copies of Q and K are integers."""
    stats: torch.Tensor
    """FP32: of each GROUP queries their log-sum-exps, deltas and, in INT8, scales."""
    width: int  # numbers of ``stats`` for GROUP queries
    padded_starts: torch.Tensor  # int32 [B]
    padded_tokens: int

    @classmethod
    def of(
        cls,
        queries: torch.Tensor,
        query_scales: torch.Tensor | None,
        keys: PackedKeys,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        d_output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        max_length: int,
        build: Build,
    ) -> "Copies":
        """Checks the arguments of ``attention_backward`` and takes them."""
        tokens, heads, dim = queries.shape
        kv_heads, device = keys.keys.shape[1], queries.device
        checked(queries, query_scales, keys, build)
        scales = query_scales, keys.key_scales, keys.value_scales
        read = queries, keys.keys, keys.values, *scales, output, log_sum_exp, d_output
        if not all(x is None or x.is_contiguous() for x in read):
            raise ValueError("the backward of attention takes contiguous tensors")
        # The rows are a bound: the host does not know the lengths.
        rows, both, batch = GROUP.value, BLOCK.value, lengths.numel()
        padded = (lengths + (both - 1)) // both * both
        padded_tokens = triton.cdiv(tokens + batch * (both - 1), both) * both
        padded_starts = (padded.cumsum(0) - padded).int()
        row = triton.next_power_of_2(dim)
        bf16 = torch.bfloat16
        q, do = torch.empty((2, heads * padded_tokens, row), dtype=bf16, device=device)
        k, v = torch.empty((2, kv_heads * padded_tokens, row), dtype=bf16, device=device)
        k_scales, width = None, both
        if queries.dtype == torch.int8:
            k_scales, width = log_sum_exp.new_empty(kv_heads * padded_tokens), 2 * both
        stats = log_sum_exp.new_empty(heads * padded_tokens // rows * width)
        (queries, keys_read, values), _ = as_read(build, queries, keys.keys, keys.values)
        _prepare_kernel[(heads + kv_heads, triton.cdiv(max_length, both) * 2, batch)](
            queries, query_scales, keys_read, keys.key_scales, values, keys.value_scales, output,
            log_sum_exp, d_output, starts, lengths, padded_starts, q, k, v, do, stats, k_scales,
            padded_tokens, heads, kv_heads, dim, row, width, num_warps=4 if row <= 128 else 8,
        )  # fmt: skip
        return cls(q, k, v, do, k_scales, stats, width, padded_starts, padded_tokens)


@dataclass(frozen=True, slots=True)
class Walk:
    """Rows that a program owns and walks at once, its warps, and tiles that are on their way."""

    owned: int
    walked: int
    warps: int
    stages: int


def walk(dim: int) -> Walk:
    """The walk of both kernels for a head size."""
    if dim > 128:
        return Walk(owned=16, walked=64, warps=8, stages=2)
    if dim > 64:
        return Walk(owned=128, walked=32, warps=8, stages=2)
    return Walk(owned=64, walked=32, warps=4, stages=3)


def attention_backward(
    queries: torch.Tensor,
    query_scales: torch.Tensor | None,
    keys: PackedKeys,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    d_output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    window: int | None = None,
    build: Build = PORTABLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``prefill_attention`` over whole sequences, with respect to the dequantised Q, K
    and V.

    queries E4M3 or INT8 [T, H, D] with FP32 scales [T, H], or BF16 without; output and d_output
    BF16 [T, H, D]; log_sum_exp FP32 [T, H], base 2; sequence b is rows starts[b] to starts[b] +
    lengths[b] (int32 [B], at most max_length, disjoint).

    -> dq BF16 [T, H, D], dk and dv BF16 [T, G, D]; rows of no sequence are undefined.  Raises
    ValueError for shapes and formats that attention does not take, and for tensors that are not
    contiguous.
    """
    (tokens, heads, dim), kv_heads = queries.shape, keys.keys.shape[1]
    made = Copies.of(
        queries, query_scales, keys, output, log_sum_exp, d_output, starts, lengths, max_length,
        build,
    )  # fmt: skip
    dq = torch.empty_like(d_output)
    dk, dv = d_output.new_empty((2, tokens, kv_heads, dim))
    read = made.queries, made.keys, made.values, made.d_output, made.stats, made.key_scales
    places = starts, lengths, made.padded_starts, made.padded_tokens
    factors = math.log2(math.e) / dim**0.5, dim**-0.5  # of scores in exponents of 2; of dK and dQ
    how = walk(dim)
    sizes = (
        heads, kv_heads, dim, triton.next_power_of_2(dim), made.width, how.owned, how.walked,
        how.stages, window or 0,
    )  # fmt: skip
    blocks, batch = triton.cdiv(max_length, how.owned), lengths.numel()
    _keys_kernel[(kv_heads, batch, blocks)](
        *read, dk, dv, *places, *factors, *sizes, num_warps=how.warps, num_stages=how.stages
    )
    _queries_kernel[(heads, batch, blocks)](
        *read, dq, *places, *factors, *sizes, num_warps=how.warps, num_stages=how.stages
    )
    return dq, dk, dv
