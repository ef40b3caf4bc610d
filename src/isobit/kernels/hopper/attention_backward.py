"""The backward of causal attention on Hopper: two kernels without atomics, which repeat their bits.

What they compute, over which copies and in which order of heads, is that of
``isobit.kernels.triton.attention_backward``, and a first kernel, which makes the copies, is its
own: so the copy engine reads whole tiles.  The queries' kernel walks keys from the diagonal down.
A tile that a window's edge cuts may be wholly masked for one warpgroup: P = 0 there.

A program is two warpgroups that compute GROUP rows each, and one warp that copies tiles into a ring
of buffers: `full` signals that a tile has arrived, `empty` that both groups have read it.  Roles
and registers are assigned by hand, in Gluon: under Triton's own pipeline the keys' kernel spills or
waits, and the whole reaches 290 TFLOP/s (4 x 4096) instead of 450.  The blocks with the longest
walk run first.

Measured on one H200 (32 query heads, 8 KV heads of 128):
benchmarks/results/attention_backward.json.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper.tma import (
    async_copy_global_to_shared as copy_tile,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isobit.kernels.hopper.attention import HOPPER
from isobit.kernels.triton import attention_backward as portable
from isobit.kernels.triton.attention import PackedKeys
from isobit.kernels.triton.attention_backward import BLOCK, GROUP, Copies

# GROUP rows are a warpgroup's; BLOCK are a program's, and keys that the queries' kernel takes.
KEY_STAGES, QUERY_STAGES = 3, 2  # buffers of each kernel
SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=2)  # BF16 tiles, as the tensor cores read them
_HEAD_SIZES = 64, 128
FLAT = gl.NVMMASharedLayout(0, 32, rank=1)  # FP32 vectors


@gluon.jit
def _ring(STAGES: gl.constexpr):
    """The barriers of a ring of buffers, and one for what is copied once -> full, empty, ready.

    `full` and `ready` take one arrival, the producer's ``expect``, and turn when its bytes have
    arrived; `empty` takes one from each of the two warpgroups.  Step i uses buffer i % STAGES for
    the (i // STAGES)th time, and that number's parity is the phase that a consumer waits for.  The
    producer waits for the other phase, which a new barrier passes at once.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty, ready


@gluon.jit
def _keys_tile(
    k, v, q_smem, do_smem, stats_smem, full, empty, step, distance, dk, dv, c,
    DIAGONAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Add GROUP queries' part to the dK and dV of GROUP keys, the first of which is ``distance``
    positions behind the first query.  ``c`` is a number, or c s_k of each key in INT8.

    Keys are down and queries across: S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T, in
    registers, are the left operands of dV = P^T dO and dK = dS^T Q.  All four products read their
    right operand, Q or dO, in shared memory.
    """
    STAGES: gl.constexpr = q_smem.shape[0]
    D: gl.constexpr = q_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    SCALED: gl.constexpr = stats_smem.shape[1] > BLOCK
    stage = step % STAGES
    q = q_smem.index(stage)
    do = do_smem.index(stage)
    stats = stats_smem.index(stage)

    # Both first products are in flight while the vectors are read; dP^T starts from -delta.
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    zeros = gl.zeros([GROUP, GROUP], gl.float32, s_layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    delta = stats.slice(GROUP, GROUP).load(column)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros - delta[None, :], is_async=True)
    lse = stats.slice(0, GROUP).load(column)

    # P^T, while the second product runs.
    s = warpgroup_mma_wait(1, deps=[s])  # all but the last product issued
    if SCALED:
        s *= c[:, None]
        p = gl.exp2(s * stats.slice(2 * GROUP, GROUP).load(column)[None, :] - lse[None, :])
    else:
        p = gl.exp2(s * c - lse[None, :])
    key = gl.arange(0, GROUP, gl.SliceLayout(1, s_layout))
    query = gl.arange(0, GROUP, column)
    if DIAGONAL:
        p = gl.where(key[:, None] <= query[None, :], p, 0.0)
    if WINDOW:  # noqa: SIM102 (known when it is compiled)
        if distance + GROUP > WINDOW:  # its edge cuts the tile
            p = gl.where((query + (distance - WINDOW))[None, :] < key[:, None], p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), a_layout), do, dv, is_async=True)

    # dS^T, while dV's product runs.
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = p * dp
    if SCALED:  # Q's integers lack their scales
        ds *= stats.slice(2 * GROUP, GROUP).load(column)[None, :]
    ds = gl.convert_layout(ds.to(gl.bfloat16), a_layout)
    dk = warpgroup_mma(ds, q, dk, is_async=True)

    # In flight across tiles, these two would cost registers and 2% of the time.
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _keys_consumer(
    k_smem, v_smem, q_smem, do_smem, stats_smem, full, empty, ready, DK, DV, K_SCALE, row, keys,
    tiles, c, scale,
    R: gl.constexpr, G: gl.constexpr, WHICH: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `_keys_kernel`: keys WHICH * GROUP to GROUP more of its BLOCK.

    Queries' tiles count from the block's first token, so tile WHICH is on the diagonal.
    """
    D: gl.constexpr = q_smem.shape[2]
    STAGES: gl.constexpr = q_smem.shape[0]
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k = k_smem.index(WHICH)
    v = v_smem.index(WHICH)
    dk = gl.zeros([GROUP, D], gl.float32, d_layout)
    dv = gl.zeros([GROUP, D], gl.float32, d_layout)
    if K_SCALE is not None:
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
        c *= gl.load(K_SCALE + WHICH * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, s_layout)))
    mbarrier.wait(ready, 0)
    step = 0  # of the ring: tiles of all heads, end to end
    for _ in range(R):
        # No query of the first tile sees a key of the second group, which must release the buffer
        # unread, since `empty` counts both groups.
        if WHICH == 1:
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
        if tiles > WHICH:  # else the sequence ends before this group's keys
            dk, dv = _keys_tile(
                k, v, q_smem, do_smem, stats_smem, full, empty, step, 0, dk, dv, c, True, WINDOW
            )
            step += 1
            for i in range(WHICH + 1, tiles):
                dk, dv = _keys_tile(
                    k, v, q_smem, do_smem, stats_smem, full, empty, step, (i - WHICH) * GROUP, dk,
                    dv, c, False, WINDOW,
                )  # fmt: skip
                step += 1

    # dS^T Q lacks the 1 / sqrt(D) of the scores.  DK and DV, [T, G, D], point at the KV head.
    key = WHICH * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, d_layout))
    at = (row + key)[:, None] * (G * D) + gl.arange(0, D, gl.SliceLayout(0, d_layout))[None, :]
    inside = (key < keys)[:, None]
    gl.store(DK + at, (dk * scale).to(gl.bfloat16), mask=inside)
    gl.store(DV + at, dv.to(gl.bfloat16), mask=inside)


@gluon.jit
def _keys_producer(
    q_desc, k_desc, v_desc, do_desc, stats_desc, k_smem, v_smem, q_smem, do_smem, stats_smem, full,
    empty, ready,
    kv_row, q_row, padded_tokens, tiles, R: gl.constexpr,
):  # fmt: skip
    """The warp that copies K and V once, and the queries' tiles of all heads in order."""
    D: gl.constexpr = q_smem.shape[2]
    STAGES: gl.constexpr = q_smem.shape[0]
    WIDTH: gl.constexpr = stats_smem.shape[1]
    mbarrier.expect(ready, 4 * BLOCK * D)  # bytes: two BF16 tiles
    for group in gl.static_range(2):
        copy_tile(k_desc, [kv_row + group * GROUP, 0], ready, k_smem.index(group))
        copy_tile(v_desc, [kv_row + group * GROUP, 0], ready, v_smem.index(group))
    step = 0
    for r in range(R):
        for i in range(tiles):
            stage = step % STAGES
            row = q_row + r * padded_tokens + i * GROUP  # of [H, padded token]
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 4 * GROUP * D + 4 * WIDTH)  # Q, dO and stats
            copy_tile(q_desc, [row, 0], full.index(stage), q_smem.index(stage))
            copy_tile(do_desc, [row, 0], full.index(stage), do_smem.index(stage))
            copy_tile(
                stats_desc, [row * (WIDTH // GROUP)], full.index(stage), stats_smem.index(stage)
            )
            step += 1


@gluon.jit
def _keys_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, K_SCALE, DK, DV, START, LENGTH, PADDED_START,
    padded_tokens, c, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK keys of one KV head, GROUP a warpgroup, over the queries of all heads that
    see them.

    Shared memory: K and V of the block, a half for each warpgroup, and the ring of Q, dO and stats.
    Registers: dK and dV in FP32, and a tile's S and dP.
    """
    g = gl.program_id(0)
    b = gl.program_id(1)
    first = gl.program_id(2) * BLOCK
    length = gl.load(LENGTH + b)
    if first >= length:
        return
    R: gl.constexpr = H // G
    start = gl.load(PADDED_START + b) + first  # row of a head's padded copy
    tiles = (length - first + GROUP - 1) // GROUP  # of queries, to the sequence's end
    if WINDOW:  # or to the last that sees the block's last key
        tiles = gl.minimum(tiles, (BLOCK + WINDOW + GROUP - 2) // GROUP)
    row = (gl.load(START + b) + first).to(gl.int64)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, GROUP, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, GROUP, D], do_desc.layout)
    stats_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES, stats_desc.block_type.shape[0]], stats_desc.layout
    )
    full, empty, ready = _ring(STAGES)
    keys = length - first
    DK += g * D
    DV += g * D
    if K_SCALE is not None:
        K_SCALE += g * padded_tokens + start
    # Three roles: the program's own 4 warps, 4 more, and one that only issues copies.
    gl.warp_specialize(
        [
            (
                _keys_consumer,
                (k_smem, v_smem, q_smem, do_smem, stats_smem, full, empty, ready, DK, DV, K_SCALE,
                row, keys, tiles, c, scale, R, G, 0, WINDOW),
            ),
            (
                _keys_consumer,
                (k_smem, v_smem, q_smem, do_smem, stats_smem, full, empty, ready, DK, DV, K_SCALE,
                row, keys, tiles, c, scale, R, G, 1, WINDOW),
            ),
            (
                _keys_producer,
                (
                    q_desc, k_desc, v_desc, do_desc, stats_desc, k_smem, v_smem, q_smem, do_smem,
                    stats_smem, full, empty, ready,
                    g * padded_tokens + start, g * R * padded_tokens + start, padded_tokens, tiles,
                    R,
                ),
            ),
        ],
        [4, 1],
        [232, 40],  # registers of a thread; the first group's are what is left, 232
    )  # fmt: skip


@gluon.jit
def _queries_tile(
    q, do, k_smem, v_smem, scale_smem, full, empty, step, dq, lse, delta, c, WHICH: gl.constexpr,
    DIAGONAL: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Add BLOCK keys' part to the dQ of GROUP queries; DIAGONAL: the first tile.  ``c`` is a
    number, or c s_q of each query in INT8, where ``scale_smem`` holds s_k.

    S = Q K^T and dP = dO V^T have queries down and keys across; dS stays in registers as the left
    operand of dQ = dS K.  The last product is in flight when this returns, and the next call
    releases the tile's buffer.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    stage = step % STAGES
    k = k_smem.index(stage)
    v = v_smem.index(stage)
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    zeros = gl.zeros([GROUP, BLOCK], gl.float32, s_layout)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # All but the product just issued: dQ's of the tile before, the last reader of its K.
    if not DIAGONAL:
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    dp = warpgroup_mma(do, v.permute((1, 0)), zeros - delta[:, None], is_async=True)

    # P, while dP's product runs, which starts from -delta.
    s = warpgroup_mma_wait(1, deps=[s])
    if scale_smem is not None:
        s *= scale_smem.index(stage).load(column)[None, :]
        p = gl.exp2(s * c[:, None] - lse[:, None])
    else:
        p = gl.exp2(s * c - lse[:, None])
    query = WHICH * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, s_layout))
    key = gl.arange(0, BLOCK, column)
    if DIAGONAL:
        p = gl.where(key[None, :] <= query[:, None], p, 0.0)
    if WINDOW:  # noqa: SIM102 (known when it is compiled)
        if (step + 1) * BLOCK > WINDOW:  # its edge cuts the tile
            p = gl.where(key[None, :] > (query + (step * BLOCK - WINDOW))[:, None], p, 0.0)

    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * dp
    if scale_smem is not None:  # K's integers lack their scales
        ds *= scale_smem.index(stage).load(column)[None, :]
    ds = gl.convert_layout(ds.to(gl.bfloat16), a_layout)
    return warpgroup_mma(ds, k, dq, is_async=True)


@gluon.jit
def _queries_consumer(
    q_smem, do_smem, k_smem, v_smem, scale_smem, full, empty, ready, STATS, DQ, row, stats_row,
    queries, tiles, c, scale,
    H: gl.constexpr, WIDTH: gl.constexpr, WHICH: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `_queries_kernel`: queries WHICH * GROUP to GROUP more of its BLOCK, with
    dQ, log-sum-exp and delta in registers.
    """
    D: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # [H, padded token] in groups: GROUP log-sum-exps, then GROUP deltas, WIDTH numbers in all.
    stats = (
        STATS
        + (stats_row + WHICH * GROUP).to(gl.int64) * (WIDTH // GROUP)
        + gl.arange(0, GROUP, gl.SliceLayout(1, s_layout))
    )
    lse = gl.load(stats)
    delta = gl.load(stats + GROUP)
    if scale_smem is not None:
        c *= gl.load(stats + 2 * GROUP)
    q = q_smem.index(WHICH)
    do = do_smem.index(WHICH)
    dq = gl.zeros([GROUP, D], gl.float32, d_layout)
    mbarrier.wait(ready, 0)  # Q and dO have arrived
    dq = _queries_tile(
        q, do, k_smem, v_smem, scale_smem, full, empty, 0, dq, lse, delta, c, WHICH, True, WINDOW
    )
    for step in range(1, tiles):
        dq = _queries_tile(
            q, do, k_smem, v_smem, scale_smem, full, empty, step, dq, lse, delta, c, WHICH, False,
            WINDOW,
        )  # fmt: skip
    dq = warpgroup_mma_wait(0, deps=[dq])  # the last tile's

    # dS K lacks the 1 / sqrt(D) of the scores.  DQ, [T, H, D], points at the head.
    query = WHICH * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, d_layout))
    at = (row + query)[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, d_layout))[None, :]
    gl.store(DQ + at, (dq * scale).to(gl.bfloat16), mask=(query < queries)[:, None])


@gluon.jit
def _queries_producer(
    q_desc, k_desc, v_desc, do_desc, scale_desc, q_smem, do_smem, k_smem, v_smem, scale_smem, full,
    empty, ready, q_row, kv_row, tiles
):  # fmt: skip
    """The warp that copies Q and dO once, and the keys' tiles from the diagonal to ``kv_row``."""
    STAGES: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[2]
    mbarrier.expect(ready, 4 * BLOCK * D)  # bytes: two BF16 tiles
    for group in gl.static_range(2):
        copy_tile(q_desc, [q_row + group * GROUP, 0], ready, q_smem.index(group))
        copy_tile(do_desc, [q_row + group * GROUP, 0], ready, do_smem.index(group))
    for step in range(tiles):
        stage = step % STAGES
        row = kv_row + (tiles - 1 - step) * BLOCK  # of [G, padded token]
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        if scale_desc is not None:
            mbarrier.expect(full.index(stage), 4 * BLOCK * D + 4 * BLOCK)
            copy_tile(scale_desc, [row], full.index(stage), scale_smem.index(stage))
        else:
            mbarrier.expect(full.index(stage), 4 * BLOCK * D)
        copy_tile(k_desc, [row, 0], full.index(stage), k_smem.index(stage))
        copy_tile(v_desc, [row, 0], full.index(stage), v_smem.index(stage))


@gluon.jit
def _queries_kernel(
    q_desc, k_desc, v_desc, do_desc, scale_desc, STATS, DQ, START, LENGTH, PADDED_START,
    padded_tokens, c, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """dQ of BLOCK queries of one head, GROUP a warpgroup, over the keys that they see, from the
    diagonal down.

    Shared memory: Q and dO of the block, a half for each warpgroup, and the ring of K and V.
    """
    h = gl.program_id(0)
    b = gl.program_id(1)
    first = (gl.num_programs(2) - 1 - gl.program_id(2)) * BLOCK  # the longest walk first
    length = gl.load(LENGTH + b)
    if first >= length:
        return
    start = gl.load(PADDED_START + b)
    tiles = first // BLOCK + 1  # of keys, the one on the diagonal included
    if WINDOW:  # down to the first key that the block's first query sees
        tiles = gl.minimum(tiles, (WINDOW + BLOCK - 2) // BLOCK + 1)
    row = (gl.load(START + b) + first).to(gl.int64)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], v_desc.layout)
    if scale_desc is not None:
        scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], scale_desc.layout)
    else:
        scale_smem: gl.constexpr = None
    full, empty, ready = _ring(STAGES)
    queries = length - first
    DQ += h * D
    q_row = h * padded_tokens + start + first
    kv_row = h // (H // G) * padded_tokens + start
    if WINDOW:
        kv_row += first - (tiles - 1) * BLOCK
    # Roles as in `_keys_kernel`.
    gl.warp_specialize(
        [
            (
                _queries_consumer,
                (q_smem, do_smem, k_smem, v_smem, scale_smem, full, empty, ready, STATS, DQ, row,
                q_row, queries, tiles, c, scale, H, WIDTH, 0, WINDOW),
            ),
            (
                _queries_consumer,
                (q_smem, do_smem, k_smem, v_smem, scale_smem, full, empty, ready, STATS, DQ, row,
                q_row, queries, tiles, c, scale, H, WIDTH, 1, WINDOW),
            ),
            (
                _queries_producer,
                (q_desc, k_desc, v_desc, do_desc, scale_desc, q_smem, do_smem, k_smem, v_smem,
                scale_smem, full, empty, ready, q_row, kv_row, tiles),
            ),
        ],
        [4, 1],
        [232, 40],  # registers of a thread; the first group's are what is left, 232
    )  # fmt: skip


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``prefill_attention`` over whole sequences, with respect to the dequantised Q, K
    and V.

    queries E4M3 or INT8 [T, H, D] with FP32 scales [T, H], or BF16 without; output and d_output
    BF16 [T, H, D]; log_sum_exp FP32 [T, H], base 2; sequence b is rows starts[b] to starts[b] +
    lengths[b] (int32 [B], at most max_length, disjoint).

    -> dq BF16 [T, H, D], dk and dv BF16 [T, G, D]; rows of no sequence are undefined.  Raises
    ValueError for shapes and formats that attention does not take, and for tensors that are not
    contiguous.  Heads of other sizes than 64 and 128 have the portable kernels.
    """
    (tokens, heads, dim), kv_heads = queries.shape, keys.keys.shape[1]
    if dim not in _HEAD_SIZES:
        return portable.attention_backward(
            queries, query_scales, keys, output, log_sum_exp, d_output, starts, lengths,
            max_length, window, HOPPER,
        )  # fmt: skip
    made = Copies.of(
        queries, query_scales, keys, output, log_sum_exp, d_output, starts, lengths, max_length,
        HOPPER,
    )  # fmt: skip
    rows, both, width, batch = GROUP.value, BLOCK.value, made.width, lengths.numel()
    q, k, v, do, stats = made.queries, made.keys, made.values, made.d_output, made.stats
    k_scales, device = made.key_scales, queries.device
    places = starts, lengths, made.padded_starts, made.padded_tokens
    blocks = triton.cdiv(max_length, both)
    dq = torch.empty((tokens, heads, dim), dtype=torch.bfloat16, device=device)
    dk, dv = torch.empty((2, tokens, kv_heads, dim), dtype=torch.bfloat16, device=device)
    # The copy engine reads the rows of a warpgroup at once, of the queries' kernel's keys of both.
    factors = math.log2(math.e) / dim**0.5, dim**-0.5  # of scores in exponents of 2; of dK and dQ
    q_tiles, do_tiles = _tiles(q, rows), _tiles(do, rows)
    _keys_kernel[(kv_heads, batch, blocks)](
        q_tiles, _tiles(k, rows), _tiles(v, rows), do_tiles,
        TensorDescriptor.from_tensor(stats, [width], FLAT), k_scales, dk, dv, *places, *factors,
        heads, kv_heads, dim, KEY_STAGES, window or 0, num_warps=4,
    )  # fmt: skip
    _queries_kernel[(heads, batch, blocks)](
        q_tiles, _tiles(k, both), _tiles(v, both), do_tiles,
        None if k_scales is None else TensorDescriptor.from_tensor(k_scales, [both], FLAT),
        stats, dq, *places, *factors,
        heads, kv_heads, dim, width, QUERY_STAGES, window or 0, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv


def _tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A BF16 matrix as the copy engine reads it, ``rows`` at once."""
    return TensorDescriptor.from_tensor(x, [rows, x.shape[1]], SWIZZLED)
