"""The backward of whole chunks of the gated delta rule: batched products of torch, and what stands
between them as kernels, one program a chunk and value head.

With Gamma_ij = exp(G_i - G_j) on and below the diagonal, else 0:

    A = beta_i Gamma_ij (k_i . k_j), j < i      r = v - exp(G) (k S0)       T = 1 / (1 + A)
    P = Gamma_ij (q_i . k_j)                    u = T (beta r)              E = Gamma_63j k_j
    o = exp(G) (q S0) + P u                     S1 = exp(G_63) S0 + E^T u

Differences of G are made in FP64, since in FP32 they lose what small decays add, and so are the
sums that give the gradients of G, since most of what is added to one is taken away from another.

Shapes: n chunks of 64 rows, H value heads, H / r key heads, heads of DK and DV; FP32.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.delta_rows import CHUNK, DeltaRows, padded

_CHUNK = tl.constexpr(CHUNK)
WIDEST = 128  # numbers of a key or a value that a program has at once


@dataclass(frozen=True, slots=True)
class ChunkBlock:
    """n chunks: a few consecutive ones of some sequences, those of one place together, the longest
    sequence first.
    """

    counts: tuple[int, ...]  # sequences that reach each of the places, which is no more than before
    tokens: torch.Tensor  # int64 [n, 64]: the token of each row; one that is not there repeats
    sizes: torch.Tensor  # int32 [n]: rows that are there


@triton.jit
def _totals(DECAY, token, head, H: tl.constexpr):
    """FP64 [64]: G of each row."""
    i = tl.arange(0, _CHUNK)
    decay = tl.load(DECAY + token * H + head).to(tl.float64)
    return tl.sum(tl.where(i[None, :] <= i[:, None], decay[None, :], 0.0), 1)


@triton.jit
def _gather_kernel(
    Q, K, D_OUTPUT, DECAY, BETA, TOKENS, SIZES, OWN_Q, OWN_K, OWN_D, SEEN_Q, READ_K, ENDS, GAMMA,
    SEEN, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """q, k and dO of a chunk, exp(G) q, beta exp(G) k, E, Gamma and exp(G)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, _CHUNK)
    token = tl.load(TOKENS + chunk * _CHUNK + i)
    total = _totals(DECAY, token, head, H)
    last = tl.sum(tl.where(i == _CHUNK - 1, total, 0.0), 0)
    seen = tl.exp(total.to(tl.float32))
    distance = (total[:, None] - total[None, :]).to(tl.float32)
    gamma = tl.where(i[None, :] <= i[:, None], tl.exp(distance), 0.0)
    place = chunk * H + head
    tl.store(GAMMA + (place * _CHUNK + i[:, None]) * _CHUNK + i[None, :], gamma)
    tl.store(SEEN + place * _CHUNK + i, seen)
    read = tl.load(BETA + token * H + head) * seen
    left = tl.exp((last - total).to(tl.float32))
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        of_key = (token[:, None] * KH + head // (H // KH)) * DK + d
        to = (place * _CHUNK + i[:, None]) * DK + d
        q = tl.load(Q + of_key, mask=d < DK, other=0.0)
        tl.store(OWN_Q + to, q, mask=d < DK)
        tl.store(SEEN_Q + to, seen[:, None] * q, mask=d < DK)
        k = tl.load(K + of_key, mask=d < DK, other=0.0)
        tl.store(OWN_K + to, k, mask=d < DK)
        tl.store(READ_K + to, read[:, None] * k, mask=d < DK)
        tl.store(ENDS + to, left[:, None] * k, mask=d < DK)
    is_there = (i < tl.load(SIZES + chunk))[:, None]
    for first in range(0, DV, BV):
        d = first + tl.arange(0, BV)[None, :]
        of_value = (token[:, None] * H + head) * DV + d
        given = tl.load(D_OUTPUT + of_value, mask=is_there & (d < DV), other=0.0).to(tl.float32)
        tl.store(OWN_D + (place * _CHUNK + i[:, None]) * DV + d, given, mask=d < DV)


@triton.jit
def _factors_kernel(
    V, BETA, TOKENS, SEEN, GAMMA, TOLD, SHARED, READ_BY, OVERLAP, WANTED, GIVEN, H: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """k . k -> A without beta and A; q . k -> P; r and beta r."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, _CHUNK)
    token = tl.load(TOKENS + chunk * _CHUNK + i)
    place = chunk * H + head
    beta = tl.load(BETA + token * H + head)[:, None]
    seen = tl.load(SEEN + place * _CHUNK + i)[:, None]
    at = (place * _CHUNK + i[:, None]) * _CHUNK + i[None, :]
    gamma = tl.load(GAMMA + at)
    shared = tl.where(i[None, :] < i[:, None], tl.load(SHARED + at) * gamma, 0.0)
    tl.store(SHARED + at, shared)
    tl.store(OVERLAP + at, beta * shared)
    tl.store(READ_BY + at, tl.load(READ_BY + at) * gamma)
    for first in range(0, DV, BV):
        d = first + tl.arange(0, BV)[None, :]
        v = tl.load(V + (token[:, None] * H + head) * DV + d, mask=d < DV, other=0.0)
        of_row = (place * _CHUNK + i[:, None]) * DV + d
        wanted = v - seen * tl.load(TOLD + of_row, mask=d < DV, other=0.0)
        tl.store(WANTED + of_row, wanted, mask=d < DV)
        tl.store(GIVEN + of_row, beta * wanted, mask=d < DV)


@triton.jit
def _passed_kernel(
    STATE, D_BEHIND, SEEN, PASSED, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """FP64: exp(G_63) <S0, dS1>, what a chunk's last G gets by the state that is passed on."""
    place = tl.program_id(0).to(tl.int64)
    total = tl.zeros([PART, BV], tl.float64)
    column = tl.arange(0, BV)[None, :]
    for first in range(0, DK, PART):
        row = first + tl.arange(0, PART)[:, None]
        inside = (row < DK) & (column < DV)
        at = (place * DK + row) * DV + column
        state = tl.load(STATE + at, mask=inside, other=0.0)
        total += (state * tl.load(D_BEHIND + at, mask=inside, other=0.0)).to(tl.float64)
    seen = tl.load(SEEN + place * _CHUNK + _CHUNK - 1)
    tl.store(PASSED + place, tl.sum(tl.sum(total, 1), 0) * seen)


@triton.jit
def _gradients_kernel(
    BETA, TOKENS, SIZES, SEEN, GAMMA, TOLD, SHARED, READ_BY, WANTED, SEEN_Q, ENDS, D_WANTED,
    D_READ_BY, D_OVERLAP, D_QUERY, D_ENDS, PASSED, SEEN_D, DV_ROWS, D_DECAY, D_BETA,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of v, g and beta of a chunk's rows, and what those of q and k are made of: that
    of q . k in place of D_READ_BY; that of k . k and its transposed, in place of D_OVERLAP; exp(G)
    dO S0^T and Gamma_63 times D_ENDS in their places; exp(G) dv in SEEN_D.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, _CHUNK)
    token = tl.load(TOKENS + chunk * _CHUNK + i)
    is_there = i < tl.load(SIZES + chunk)
    place = chunk * H + head
    beta = tl.load(BETA + token * H + head)
    seen = tl.load(SEEN + place * _CHUNK + i)
    at = (place * _CHUNK + i[:, None]) * _CHUNK + i[None, :]
    below = i[None, :] < i[:, None]
    gamma = tl.load(GAMMA + at)
    last = tl.load(GAMMA + (place * _CHUNK + _CHUNK - 1) * _CHUNK + i)
    d_overlap = -tl.load(D_OVERLAP + at)
    of_rows = d_overlap * tl.load(SHARED + at)
    d_beta = tl.sum(of_rows, 1)
    d_read_by = tl.load(D_READ_BY + at)
    more = tl.where(below, d_read_by * tl.load(READ_BY + at), 0.0)
    of_rows = (of_rows * beta[:, None] + more).to(tl.float64)
    d_total = tl.sum(of_rows, 1) - tl.sum(of_rows, 0)
    tl.store(D_READ_BY + at, d_read_by * gamma)
    d_overlap = tl.where(below, d_overlap * gamma * beta[:, None], 0.0)
    tl.store(D_OVERLAP + at, d_overlap + tl.trans(d_overlap))
    for first in range(0, DV, BV):
        d = first + tl.arange(0, BV)[None, :]
        of_row = (place * _CHUNK + i[:, None]) * DV + d
        d_wanted = tl.load(D_WANTED + of_row, mask=d < DV, other=0.0)
        d_beta += tl.sum(d_wanted * tl.load(WANTED + of_row, mask=d < DV, other=0.0), 1)
        d_v = beta[:, None] * d_wanted
        to = (token[:, None] * H + head) * DV + d
        tl.store(DV_ROWS + to, d_v, mask=(d < DV) & is_there[:, None])
        d_v *= seen[:, None]
        tl.store(SEEN_D + of_row, d_v, mask=d < DV)
        told = tl.load(TOLD + of_row, mask=d < DV, other=0.0)
        d_total -= tl.sum((d_v * told).to(tl.float64), 1)
    moved = tl.zeros([_CHUNK], tl.float64)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        of_row = (place * _CHUNK + i[:, None]) * DK + d
        d_query = tl.load(D_QUERY + of_row, mask=d < DK, other=0.0)
        q = tl.load(SEEN_Q + of_row, mask=d < DK, other=0.0)
        d_total += tl.sum((q * d_query).to(tl.float64), 1)
        tl.store(D_QUERY + of_row, d_query * seen[:, None], mask=d < DK)
        d_ends = tl.load(D_ENDS + of_row, mask=d < DK, other=0.0)
        ends = tl.load(ENDS + of_row, mask=d < DK, other=0.0)
        moved += tl.sum((ends * d_ends).to(tl.float64), 1)
        tl.store(D_ENDS + of_row, d_ends * last[:, None], mask=d < DK)
    is_last = i == _CHUNK - 1
    moved = tl.where(is_last, 0.0, moved)
    passed = tl.load(PASSED + place)
    d_total += tl.where(is_last, tl.sum(moved, 0) + passed, -moved)
    d_decay = tl.sum(tl.where(i[:, None] >= i[None, :], d_total[:, None], 0.0), 0)
    tl.store(D_DECAY + token * H + head, d_decay.to(tl.float32), mask=is_there)
    tl.store(D_BETA + token * H + head, d_beta, mask=is_there)


@triton.jit
def _scatter_kernel(
    D_QUERY, D_KEY, TOKENS, SIZES, DQ_ROWS, DK_ROWS, H: tl.constexpr, DK: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The gradients of q and k of a chunk to the rows of their tokens."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, _CHUNK)[:, None]
    token = tl.load(TOKENS + chunk * _CHUNK + i)
    is_there = i < tl.load(SIZES + chunk)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        inside = (d < DK) & is_there
        at = ((chunk * H + head) * _CHUNK + i) * DK + d
        to = (token * H + head) * DK + d
        tl.store(DQ_ROWS + to, tl.load(D_QUERY + at, mask=inside, other=0.0), mask=inside)
        tl.store(DK_ROWS + to, tl.load(D_KEY + at, mask=inside, other=0.0), mask=inside)


def put_gradients(
    chunks: ChunkBlock,
    rows: DeltaRows,
    d_output: torch.Tensor,
    state: torch.Tensor,
    d_state: torch.Tensor | None,
    d_rows: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Write the gradients of the chunks' rows to ``d_rows``.  -> That of the states in front of the
    first chunk of each sequence, [n', H, DK, DV].

    Args:
        d_output: [T, H DV], of any dtype.
        state: S0 [n, H, DK, DV].
        d_state: of the states behind the last chunks of the sequences that go on behind these; None
            where there are none.
        d_rows: FP32 of q and k by value heads [T, H, DK], v [T, H, DV], g and beta [T, H].
    """
    n, heads, key_dim, value_dim = state.shape
    key_heads, grid = rows.q.shape[1], (n, heads)
    wide = min(padded(key_dim), WIDEST), min(padded(value_dim), WIDEST)

    def empty(*sizes: int) -> torch.Tensor:
        return state.new_empty(n, heads, *sizes)

    q, k, seen_q, read_k, ends = (empty(CHUNK, key_dim) for _ in range(5))
    given, gamma, seen = empty(CHUNK, value_dim), empty(CHUNK, CHUNK), empty(CHUNK)
    _gather_kernel[grid](
        rows.q, rows.k, d_output, rows.decay, rows.beta, chunks.tokens, chunks.sizes, q, k, given,
        seen_q, read_k, ends, gamma, seen, heads, key_heads, key_dim, value_dim, *wide,
        num_warps=8,
    )  # fmt: skip
    turned = k.transpose(2, 3)
    told, shared, read_by = k @ state, k @ turned, q @ turned
    overlap, wanted, weighted = (
        empty(CHUNK, CHUNK),
        empty(CHUNK, value_dim),
        empty(CHUNK, value_dim),
    )
    _factors_kernel[grid](
        rows.v, rows.beta, chunks.tokens, seen, gamma, told, shared, read_by, overlap, wanted,
        weighted, heads, value_dim, wide[1], num_warps=8,
    )  # fmt: skip
    one = torch.eye(CHUNK, device=k.device).expand_as(overlap)
    inverse = torch.linalg.solve_triangular(overlap, one, upper=False, unitriangular=True)
    d_updates = read_by.transpose(2, 3) @ given
    reads = (inverse @ read_k).transpose(2, 3)
    d_front = _added(seen_q.transpose(2, 3) @ given, reads, d_updates, -1)
    d_behind, d_state = _behind(d_front, reads, ends, seen, chunks.counts, d_state)
    del d_front, reads
    updates = inverse @ weighted
    d_wanted = inverse.transpose(2, 3) @ _added(d_updates, ends, d_behind)
    along = updates.transpose(2, 3)
    d_read_by, d_overlap = given @ along, d_wanted @ along
    from_state = state.transpose(2, 3)
    d_query, d_ends = given @ from_state, updates @ d_behind.transpose(2, 3)
    dq_rows, dk_rows, dv_rows, d_decay, d_beta = d_rows
    passed = torch.empty(n * heads, dtype=torch.float64, device=state.device)
    _passed_kernel[(n * heads,)](
        state, d_behind, seen, passed, key_dim, value_dim, padded(value_dim), 16, num_warps=4
    )
    seen_d = empty(CHUNK, value_dim)
    _gradients_kernel[grid](
        rows.beta, chunks.tokens, chunks.sizes, seen, gamma, told, shared, read_by, wanted, seen_q,
        ends, d_wanted, d_read_by, d_overlap, d_query, d_ends, passed, seen_d, dv_rows,
        d_decay, d_beta, heads, key_dim, value_dim, *wide, num_warps=8,
    )  # fmt: skip
    d_key = _added(d_ends, d_read_by.transpose(2, 3), q)
    _added(_added(d_key, d_overlap, k), seen_d, from_state, -1)
    _added(d_query, d_read_by, k)
    _scatter_kernel[grid](
        d_query, d_key, chunks.tokens, chunks.sizes, dq_rows, dk_rows, heads, key_dim, wide[0],
        num_warps=4,
    )  # fmt: skip
    return d_state


def _added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """``total`` [n, H, ...] plus or minus a b, in its place."""
    flat = total.flatten(0, 1)
    torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), alpha=sign, out=flat)
    return total


def _behind(
    d_front: torch.Tensor, reads: torch.Tensor, ends: torch.Tensor, seen: torch.Tensor,
    counts: Sequence[int], d_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of the states behind each chunk, and of those in front of the first, from what
    each chunk adds to that of the state in front of it by its outputs.
    """
    final = seen[:, :, -1:, None]
    d_behind, end = torch.zeros_like(d_front), len(d_front)
    for count in reversed(counts):
        here = slice(end - count, end)
        if d_state is not None:
            d_behind[here][: len(d_state)] = d_state
        d_state = torch.addcmul(d_front[here], final[here], d_behind[here])
        _added(d_state, reads[here], ends[here] @ d_behind[here], -1)
        end -= count
    assert d_state is not None, "a block has chunks"
    return d_behind, d_state
