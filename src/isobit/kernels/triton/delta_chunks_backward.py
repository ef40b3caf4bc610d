"""The backward of whole chunks of the gated delta rule.

With Gamma_ij = exp(G_i - G_j) on and below the diagonal, else 0:

    A = beta_i Gamma_ij (k_i . k_j), j < i      r = v - exp(G) (k S0)       T = 1 / (1 + A)
    P = Gamma_ij (q_i . k_j)                    u = T (beta r)              E = Gamma_63j k_j
    o = exp(G) (q S0) + P u                     S1 = exp(G_63) S0 + E^T u

The gradient of the state alone goes from a chunk to the one before it.  With W = T (beta exp(G) k)
and F = (exp(G) q)^T dO - W^T (P^T dO), which need no state,

    dS0 = exp(G_63) dS1 + F - W^T (E dS1)

so F is made of all chunks at once, and ``_states_kernel`` walks them from the end, a program for
some columns of a state, and puts dS1 in the place of F.  The gradients of what a chunk is made of
are then those of all chunks at once, by programs for some rows and columns of a chunk and head.

**Precision.**  Products are those of TF32 on tensor cores, three for one (``tf32x3``): both
operands are cut in two numbers of 11 bits, and the product of the lower ones is left out.
Differences of G are made in FP64, since in FP32 they lose what small decays add, and so are the
sums that give the gradients of G, since most of what is added to one is taken away from another.

Shapes: n chunks of 64 rows, H value heads, H / r key heads (KH), heads of DK and DV; FP32.  Rows
that are not there are zeros.
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
_DEPTH = tl.constexpr(16)  # terms of a sum that a product takes at once
ROWS, WIDEST = 32, 64
"""A program has so many rows of a chunk and numbers of a key or a value.  Hopper's products of 64
rows read operands, once they are cut, from shared memory: only ``_reads_kernel``,
``_pairs_kernel`` and ``_ends_kernel`` are faster so.
"""
COLUMNS = 32  # of a state that a program walks, with all its rows; half as many of more than 128


@dataclass(frozen=True, slots=True)
class ChunkBlock:
    """n chunks: a few consecutive ones of some sequences, those of one place together, the longest
    sequence first.
    """

    tokens: torch.Tensor  # int64 [n]: the token of the first row
    sizes: torch.Tensor  # int32 [n]: rows
    states: torch.Tensor  # int64 [n]: the place of the state in front of it, -1 where it is zeros
    firsts: torch.Tensor  # int32 [places]: the first chunk of each place
    lengths: torch.Tensor  # int32 [sequences]: chunks of each


@triton.jit
def _added(total, a, of_a, a_step, b, of_b, b_step, terms, scale):
    """[M, N] ``total`` plus a b: row m of a and column n of b are at the pointers ``a`` [M, 1] and
    ``b`` [1, N], where ``of_a`` and ``of_b`` say that they are there, their term j so many steps
    further; those of a also times ``scale[j]``, if there is one.
    """
    for first in range(0, terms, _DEPTH):
        j = first + tl.arange(0, _DEPTH)
        row, column = j[None, :], j[:, None]
        x = tl.load(a + row * a_step, mask=of_a & (row < terms), other=0.0).to(tl.float32)
        if scale is not None:
            x *= tl.load(scale + j, mask=j < terms, other=0.0)[None, :]
        y = tl.load(b + column * b_step, mask=of_b & (column < terms), other=0.0).to(tl.float32)
        total = tl.dot(x, y, total, input_precision="tf32x3")
    return total


@triton.jit
def _span(axis: tl.constexpr, SIZE: tl.constexpr):
    """SIZE rows or columns, those of the program's place along an axis of the grid."""
    return tl.program_id(axis) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _place(H: tl.constexpr):
    """The program's place in [n, H], along the grid's first axis, with its chunk and its head."""
    place = tl.program_id(0).to(tl.int64)
    return place, place // H, place % H


@triton.jit
def _key(token, head, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr):
    """The beginning of a token's key for a value head in [T, KH, DK], and of its query."""
    return (token * KH + head // (H // KH)) * DK


@triton.jit
def _chunk_factors_kernel(
    Q, K, DECAY, BETA, TOKENS, SIZES, SEEN, LEFT, BETAS, BETA_SEEN, GAMMA, SHARED, READ_BY, OVERLAP,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of exp(G), exp(G_63 - G), beta and beta exp(G) [n, H, 64], and of Gamma, A without
    beta, P and A [n, H, 64, 64].
    """
    place, chunk, head = _place(H)
    i, j = _span(1, ROWS), tl.arange(0, _CHUNK)
    token, size = tl.load(TOKENS + chunk), tl.load(SIZES + chunk)
    decay = tl.load(DECAY + (token + j) * H + head, mask=j < size, other=0.0).to(tl.float64)
    total = tl.sum(tl.where(j[None, :] <= i[:, None], decay[None, :], 0.0), 1)
    others = tl.sum(tl.where(j[:, None] <= j[None, :], decay[:, None], 0.0), 0)
    seen = tl.exp(total.to(tl.float32))
    tl.store(SEEN + place * _CHUNK + i, seen)
    tl.store(LEFT + place * _CHUNK + i, tl.exp((tl.sum(decay, 0) - total).to(tl.float32)))
    beta = tl.load(BETA + (token + i) * H + head, mask=i < size, other=0.0)
    tl.store(BETAS + place * _CHUNK + i, beta)
    tl.store(BETA_SEEN + place * _CHUNK + i, beta * seen)
    at = (place * _CHUNK + i[:, None]) * _CHUNK + j[None, :]
    distance = (total[:, None] - others[None, :]).to(tl.float32)
    gamma = tl.where(j[None, :] <= i[:, None], tl.exp(distance), 0.0)
    tl.store(GAMMA + at, gamma)
    rows = _key(token + i, head, H, KH, DK)[:, None]
    columns = K + _key(token + j, head, H, KH, DK)[None, :]
    own, there = (i < size)[:, None], (j < size)[None, :]
    shared = tl.zeros([ROWS, _CHUNK], tl.float32)
    shared = _added(shared, K + rows, own, 1, columns, there, 1, DK, None)
    shared = tl.where(j[None, :] < i[:, None], shared * gamma, 0.0)
    tl.store(SHARED + at, shared)
    tl.store(OVERLAP + at, beta[:, None] * shared)
    read_by = tl.zeros([ROWS, _CHUNK], tl.float32)
    read_by = _added(read_by, Q + rows, own, 1, columns, there, 1, DK, None)
    tl.store(READ_BY + at, read_by * gamma)


@triton.jit
def _reads_kernel(
    K, TOKENS, SIZES, BETA_SEEN, INVERSE, READS, H: tl.constexpr, KH: tl.constexpr,
    DK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK rows of W^T [n, H, DK, 64]."""
    place, chunk, head = _place(H)
    i = tl.arange(0, _CHUNK)[None, :]
    d = _span(1, BK)[:, None]
    key = K + _key(tl.load(TOKENS + chunk), head, H, KH, DK) + d
    reads = _added(
        tl.zeros([BK, _CHUNK], tl.float32), key, d < DK, KH * DK,
        INVERSE + (place * _CHUNK + i) * _CHUNK, i < _CHUNK, 1, tl.load(SIZES + chunk),
        BETA_SEEN + place * _CHUNK,
    )  # fmt: skip
    tl.store(READS + (place * DK + d) * _CHUNK + i, reads, mask=d < DK)


@triton.jit
def _outputs_kernel(
    D_OUTPUT, TOKENS, SIZES, READ_BY, D_UPDATES, H: tl.constexpr, DV: tl.constexpr,
    BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and BV columns of P^T dO [n, H, 64, DV]."""
    place, chunk, head = _place(H)
    i = _span(2, ROWS)[:, None]
    v = _span(1, BV)[None, :]
    given = D_OUTPUT + (tl.load(TOKENS + chunk) * H + head) * DV + v
    made = _added(
        tl.zeros([ROWS, BV], tl.float32), READ_BY + place * (_CHUNK * _CHUNK) + i, i < _CHUNK,
        _CHUNK, given, v < DV, H * DV, tl.load(SIZES + chunk), None,
    )  # fmt: skip
    tl.store(D_UPDATES + (place * _CHUNK + i) * DV + v, made, mask=v < DV)


@triton.jit
def _fronts_kernel(
    Q, D_OUTPUT, TOKENS, SIZES, SEEN, READS, D_UPDATES, FRONTS, H: tl.constexpr, KH: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BK rows and BV columns of F [n, H, DK, DV]."""
    place, chunk, head = _place(H)
    token, size = tl.load(TOKENS + chunk), tl.load(SIZES + chunk)
    d = _span(1, BK)[:, None]
    v = _span(2, BV)[None, :]
    taken = _added(
        tl.zeros([BK, BV], tl.float32), READS + (place * DK + d) * _CHUNK, d < DK, 1,
        D_UPDATES + place * _CHUNK * DV + v, v < DV, DV, _CHUNK, None,
    )  # fmt: skip
    query = Q + _key(token, head, H, KH, DK) + d
    given = D_OUTPUT + (token * H + head) * DV + v
    front = _added(
        -taken, query, d < DK, KH * DK, given, v < DV, H * DV, size, SEEN + place * _CHUNK
    )
    tl.store(FRONTS + (place * DK + d) * DV + v, front, mask=(d < DK) & (v < DV))


@triton.jit(do_not_specialize=["followed"])
def _states_kernel(
    K, TOKENS, SIZES, SEEN, LEFT, READS, FRONTS, SENT, FIRSTS, LENGTHS, D_STATES, TO, followed,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """BV columns of dS1 of a sequence's chunks, in the places of F, and in TO of the gradient of
    the state in front of its first.  D_STATES has dS1 of the last chunks of the first ``followed``
    sequences; that of others is zeros.  To SENT [n, H, 64, DV], E dS1.  SIZE is DK, padded.
    """
    sequence, head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    i, d = tl.arange(0, _CHUNK)[:, None], tl.arange(0, SIZE)[:, None]
    v = _span(1, BV)[None, :]
    inside = (d < DK) & (v < DV)
    at = ((sequence * H + head) * DK + d) * DV + v
    total = tl.load(D_STATES + at, mask=inside & (sequence < followed), other=0.0)
    length = tl.load(LENGTHS + sequence)
    for back in range(length):
        chunk = tl.load(FIRSTS + length - 1 - back) + sequence
        place = chunk * H + head
        of_front = FRONTS + place * DK * DV + v
        front = tl.load(of_front + d * DV, mask=inside, other=0.0)
        tl.store(of_front + d * DV, total, mask=inside)
        tl.debug_barrier()
        key = K + _key(tl.load(TOKENS + chunk) + i, head, H, KH, DK)
        sent = _added(
            tl.zeros([_CHUNK, BV], tl.float32), key, i < tl.load(SIZES + chunk), 1, of_front,
            v < DV, DV, DK, None,
        )  # fmt: skip
        sent *= tl.load(LEFT + place * _CHUNK + i)
        of_row = SENT + place * _CHUNK * DV + v
        tl.store(of_row + i * DV, sent, mask=v < DV)
        tl.debug_barrier()
        taken = _added(
            tl.zeros([SIZE, BV], tl.float32), READS + (place * DK + d) * _CHUNK, d < DK, 1,
            of_row, v < DV, DV, _CHUNK, None,
        )  # fmt: skip
        total = tl.load(SEEN + place * _CHUNK + _CHUNK - 1) * total + front - taken
    tl.store(TO + at, total, mask=inside)


@triton.jit
def _told_kernel(
    K, V, TOKENS, SIZES, STATES, KEPT, SEEN, SENT, TOLD, WANTED, D_UPDATES, H: tl.constexpr,
    KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and BV columns of exp(G) (k S0) and r [n, H, 64, DV]; E dS1 is added to
    D_UPDATES, which is P^T dO.
    """
    place, chunk, head = _place(H)
    token, own = tl.load(TOKENS + chunk), tl.load(STATES + chunk)
    i = _span(2, ROWS)[:, None]
    there = i < tl.load(SIZES + chunk)
    v = _span(1, BV)[None, :]
    of_row = (place * _CHUNK + i) * DV + v
    key = K + _key(token + i, head, H, KH, DK)
    told = _added(
        tl.zeros([ROWS, BV], tl.float32), key, there, 1,
        KEPT + (own * H + head) * DK * DV + v, (v < DV) & (own >= 0), DV, DK, None,
    ) * tl.load(SEEN + place * _CHUNK + i)  # fmt: skip
    tl.store(TOLD + of_row, told, mask=v < DV)
    of_value = V + ((token + i) * H + head) * DV + v
    wanted = tl.load(of_value, mask=there & (v < DV), other=0.0) - told
    tl.store(WANTED + of_row, wanted, mask=v < DV)
    d_updates = tl.load(D_UPDATES + of_row, mask=v < DV, other=0.0)
    d_updates += tl.load(SENT + of_row, mask=v < DV, other=0.0)
    tl.store(D_UPDATES + of_row, d_updates, mask=v < DV)


@triton.jit
def _updates_kernel(
    INVERSE, BETAS, WANTED, D_UPDATES, UPDATES, D_WANTED, DV: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and BV columns of u and of the gradient of beta r [n, H, 64, DV]."""
    place = tl.program_id(0).to(tl.int64)
    i = _span(2, ROWS)[:, None]
    v = _span(1, BV)[None, :]
    inverse, first = INVERSE + place * (_CHUNK * _CHUNK), place * _CHUNK * DV + v
    updates = _added(
        tl.zeros([ROWS, BV], tl.float32), inverse + i * _CHUNK, i < _CHUNK, 1, WANTED + first,
        v < DV, DV, _CHUNK, BETAS + place * _CHUNK,
    )  # fmt: skip
    tl.store(UPDATES + first + i * DV, updates, mask=v < DV)
    d_wanted = _added(
        tl.zeros([ROWS, BV], tl.float32), inverse + i, i < _CHUNK, _CHUNK, D_UPDATES + first,
        v < DV, DV, _CHUNK, None,
    )  # fmt: skip
    tl.store(D_WANTED + first + i * DV, d_wanted, mask=v < DV)


@triton.jit
def _pairs_kernel(
    D_OUTPUT, TOKENS, SIZES, UPDATES, D_WANTED, D_READ_BY, D_OVERLAP, H: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """The gradients of P and of -A, [n, H, 64, 64], above the diagonals too."""
    place, chunk, head = _place(H)
    i, j = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    at = (place * _CHUNK + i) * _CHUNK + j
    along, every = UPDATES + (place * _CHUNK + j) * DV, j < _CHUNK
    given = D_OUTPUT + ((tl.load(TOKENS + chunk) + i) * H + head) * DV
    none, there = tl.zeros([_CHUNK, _CHUNK], tl.float32), i < tl.load(SIZES + chunk)
    tl.store(D_READ_BY + at, _added(none, given, there, 1, along, every, 1, DV, None))
    d_wanted = D_WANTED + (place * _CHUNK + i) * DV
    d_overlap = _added(none, d_wanted, i < _CHUNK, 1, along, every, 1, DV, None)
    tl.store(D_OVERLAP + at, d_overlap)


@triton.jit
def _ends_kernel(
    D_OUTPUT, TOKENS, SIZES, STATES, KEPT, SEEN, LEFT, D_BEHIND, UPDATES, D_QUERY, D_ENDS,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK columns of what q and k get by states: exp(G) (dO S0^T) and exp(G_63 - G) (u dS1^T), [n,
    H, 64, DK].
    """
    place, chunk, head = _place(H)
    own = tl.load(STATES + chunk)
    i = tl.arange(0, _CHUNK)[:, None]
    d = _span(1, BK)[None, :]
    to = (place * _CHUNK + i) * DK + d
    given = D_OUTPUT + ((tl.load(TOKENS + chunk) + i) * H + head) * DV
    d_query = _added(
        tl.zeros([_CHUNK, BK], tl.float32), given, i < tl.load(SIZES + chunk), 1,
        KEPT + ((own * H + head) * DK + d) * DV, (d < DK) & (own >= 0), 1, DV, None,
    )  # fmt: skip
    tl.store(D_QUERY + to, d_query * tl.load(SEEN + place * _CHUNK + i), mask=d < DK)
    d_ends = _added(
        tl.zeros([_CHUNK, BK], tl.float32), UPDATES + (place * _CHUNK + i) * DV, i < _CHUNK, 1,
        D_BEHIND + (place * DK + d) * DV, d < DK, 1, DV, None,
    )  # fmt: skip
    tl.store(D_ENDS + to, d_ends * tl.load(LEFT + place * _CHUNK + i), mask=d < DK)


@triton.jit
def _passed_kernel(
    STATES, KEPT, D_BEHIND, SEEN, PASSED, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BV: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """FP64 [n, H]: exp(G_63) <S0, dS1>, what a chunk's last G gets by the state that is passed
    on.
    """
    place, chunk, head = _place(H)
    own = tl.load(STATES + chunk)
    total = tl.zeros([PART, BV], tl.float64)
    column = tl.arange(0, BV)[None, :]
    for first in range(0, DK, PART):
        row = first + tl.arange(0, PART)[:, None]
        inside = (row < DK) & (column < DV) & (own >= 0)
        state = tl.load(KEPT + ((own * H + head) * DK + row) * DV + column, mask=inside, other=0.0)
        behind = tl.load(D_BEHIND + (place * DK + row) * DV + column, mask=inside, other=0.0)
        total += (state * behind).to(tl.float64)
    seen = tl.load(SEEN + place * _CHUNK + _CHUNK - 1)
    tl.store(PASSED + place, tl.sum(tl.sum(total, 1), 0) * seen)


@triton.jit
def _gates_kernel(
    Q, K, TOKENS, SIZES, BETAS, GAMMA, SHARED, READ_BY, TOLD, WANTED, D_WANTED, D_READ_BY,
    D_OVERLAP, D_QUERY, D_ENDS, PASSED, DV_ROWS, D_DECAY, D_BETA, H: tl.constexpr,
    KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of v, g and beta of a chunk's rows; that of q . k in the place of D_READ_BY,
    that of k . k and its transposed in the place of D_OVERLAP.
    """
    place, chunk, head = _place(H)
    i = tl.arange(0, _CHUNK)
    token = tl.load(TOKENS + chunk) + i
    there = i < tl.load(SIZES + chunk)
    beta = tl.load(BETAS + place * _CHUNK + i)
    at = (place * _CHUNK + i[:, None]) * _CHUNK + i[None, :]
    below = i[None, :] < i[:, None]
    gamma = tl.load(GAMMA + at)
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
        v = first + tl.arange(0, BV)[None, :]
        of_row = (place * _CHUNK + i[:, None]) * DV + v
        d_wanted = tl.load(D_WANTED + of_row, mask=v < DV, other=0.0)
        d_beta += tl.sum(d_wanted * tl.load(WANTED + of_row, mask=v < DV, other=0.0), 1)
        d_v = beta[:, None] * d_wanted
        to = DV_ROWS + (token[:, None] * H + head) * DV + v
        tl.store(to, d_v, mask=there[:, None] & (v < DV))
        told = tl.load(TOLD + of_row, mask=v < DV, other=0.0)
        d_total -= tl.sum((d_v * told).to(tl.float64), 1)
    moved = tl.zeros([_CHUNK], tl.float64)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        of_row = (place * _CHUNK + i[:, None]) * DK + d
        of_key = _key(token[:, None], head, H, KH, DK) + d
        inside = there[:, None] & (d < DK)
        q = tl.load(Q + of_key, mask=inside, other=0.0)
        d_query = tl.load(D_QUERY + of_row, mask=inside, other=0.0)
        d_total += tl.sum((q * d_query).to(tl.float64), 1)
        k = tl.load(K + of_key, mask=inside, other=0.0)
        d_ends = tl.load(D_ENDS + of_row, mask=inside, other=0.0)
        moved += tl.sum((k * d_ends).to(tl.float64), 1)
    is_last = i == _CHUNK - 1
    moved = tl.where(is_last, 0.0, moved)
    passed = tl.load(PASSED + place)
    d_total += tl.where(is_last, tl.sum(moved, 0) + passed, -moved)
    d_decay = tl.sum(tl.where(i[:, None] >= i[None, :], d_total[:, None], 0.0), 0)
    tl.store(D_DECAY + token * H + head, d_decay.to(tl.float32), mask=there)
    tl.store(D_BETA + token * H + head, d_beta, mask=there)


@triton.jit
def _chunk_keys_kernel(
    Q, K, TOKENS, SIZES, STATES, KEPT, BETA_SEEN, D_WANTED, D_READ_BY, D_OVERLAP, D_QUERY, D_ENDS,
    DQ_ROWS, DK_ROWS, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and BK columns of the gradients of q and k of a chunk's rows."""
    place, chunk, head = _place(H)
    own, token, size = tl.load(STATES + chunk), tl.load(TOKENS + chunk), tl.load(SIZES + chunk)
    i = _span(2, ROWS)[:, None]
    d = _span(1, BK)[None, :]
    of_row, to = (place * _CHUNK + i) * DK + d, ((token + i) * H + head) * DK + d
    of_keys = _key(token, head, H, KH, DK) + d
    every, inside = i < _CHUNK, (i < size) & (d < DK)
    of_pairs = place * (_CHUNK * _CHUNK)
    d_query = tl.load(D_QUERY + of_row, mask=inside, other=0.0)
    d_query = _added(
        d_query, D_READ_BY + of_pairs + i * _CHUNK, every, 1, K + of_keys, d < DK, KH * DK, size,
        None,
    )  # fmt: skip
    tl.store(DQ_ROWS + to, d_query, mask=inside)
    d_key = _added(
        tl.zeros([ROWS, BK], tl.float32), D_WANTED + (place * _CHUNK + i) * DV, every, 1,
        KEPT + ((own * H + head) * DK + d) * DV, (d < DK) & (own >= 0), 1, DV, None,
    ) * -tl.load(BETA_SEEN + place * _CHUNK + i)  # fmt: skip
    d_key += tl.load(D_ENDS + of_row, mask=inside, other=0.0)
    d_key = _added(
        d_key, D_READ_BY + of_pairs + i, every, _CHUNK, Q + of_keys, d < DK, KH * DK, size, None
    )
    d_key = _added(
        d_key, D_OVERLAP + of_pairs + i * _CHUNK, every, 1, K + of_keys, d < DK, KH * DK, size,
        None,
    )  # fmt: skip
    tl.store(DK_ROWS + to, d_key, mask=inside)


def put_gradients(
    chunks: ChunkBlock,
    rows: DeltaRows,
    d_output: torch.Tensor,
    states: torch.Tensor,
    d_states: torch.Tensor | None,
    d_rows: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Write the gradients of the chunks' rows to ``d_rows``.  -> Those of the states in front of
    the first chunk of each sequence, [sequences, H, DK, DV].

    Args:
        d_output: [T, H DV], of any dtype.
        states: [places, H, DK, DV], of which a chunk's is that in front of it.
        d_states: of the states behind the last chunks of the sequences that go on behind these,
            which come first; None where there are none.
        d_rows: FP32 of q and k by value heads [T, H, DK], v [T, H, DV], g and beta [T, H].
    """
    n, (heads, key_dim, value_dim) = len(chunks.tokens), states.shape[1:]
    sequences, key_heads = len(chunks.lengths), rows.q.shape[1]
    keys, values = min(padded(key_dim), WIDEST), min(padded(value_dim), WIDEST)
    of_keys, of_values = triton.cdiv(key_dim, keys), triton.cdiv(value_dim, values)
    dq_rows, dk_rows, dv_rows, d_decay, d_beta = d_rows
    parts = CHUNK // ROWS
    where, kept = (chunks.tokens, chunks.sizes), (chunks.states, states)
    programs = n * heads

    def empty(*shape: int) -> torch.Tensor:
        return states.new_empty(n, heads, *shape)

    seen, left, betas, beta_seen = (empty(CHUNK) for _ in range(4))
    gamma, shared, read_by, overlap = (empty(CHUNK, CHUNK) for _ in range(4))
    _chunk_factors_kernel[(programs, parts)](
        rows.q, rows.k, rows.decay, rows.beta, *where, seen, left, betas, beta_seen, gamma, shared,
        read_by, overlap, heads, key_heads, key_dim, ROWS, num_warps=4,
    )  # fmt: skip
    one = torch.eye(CHUNK, device=states.device).expand_as(overlap)
    found = torch.linalg.solve_triangular(overlap.mT, one, upper=True, unitriangular=True)
    inverse = found.mT.contiguous()  # as it is, since columns are solved
    del found, overlap
    reads, d_updates = empty(key_dim, CHUNK), empty(CHUNK, value_dim)
    _reads_kernel[(programs, of_keys)](
        rows.k, *where, beta_seen, inverse, reads, heads, key_heads, key_dim, keys, num_warps=4
    )
    _outputs_kernel[(programs, of_values, parts)](
        d_output, *where, read_by, d_updates, heads, value_dim, values, ROWS, num_warps=4
    )
    behind, sent = empty(key_dim, value_dim), empty(CHUNK, value_dim)
    some = min(keys, ROWS)
    _fronts_kernel[(programs, triton.cdiv(key_dim, some), of_values)](
        rows.q, d_output, *where, seen, reads, d_updates, behind, heads, key_heads, key_dim,
        value_dim, some, values, num_warps=4,
    )  # fmt: skip
    made = states.new_empty(sequences, heads, key_dim, value_dim)
    columns = min(padded(value_dim), COLUMNS if key_dim <= 2 * WIDEST else COLUMNS // 2)
    _states_kernel[(sequences * heads, triton.cdiv(value_dim, columns))](
        rows.k, *where, seen, left, reads, behind, sent, chunks.firsts, chunks.lengths,
        made if d_states is None else d_states, made, 0 if d_states is None else len(d_states),
        heads, key_heads, key_dim, value_dim, padded(key_dim), columns, num_warps=4,
    )  # fmt: skip
    del reads
    told, wanted = (empty(CHUNK, value_dim) for _ in range(2))
    _told_kernel[(programs, of_values, parts)](
        rows.k, rows.v, *where, *kept, seen, sent, told, wanted, d_updates, heads,
        key_heads, key_dim, value_dim, values, ROWS, num_warps=4,
    )  # fmt: skip
    del sent
    updates, d_wanted = (empty(CHUNK, value_dim) for _ in range(2))
    _updates_kernel[(programs, of_values, parts)](
        inverse, betas, wanted, d_updates, updates, d_wanted, value_dim, values, ROWS, num_warps=4
    )
    del inverse, d_updates
    d_read_by, d_overlap = empty(CHUNK, CHUNK), empty(CHUNK, CHUNK)
    _pairs_kernel[(programs,)](
        d_output, *where, updates, d_wanted, d_read_by, d_overlap, heads, value_dim, num_warps=4
    )
    d_query, d_ends = empty(CHUNK, key_dim), empty(CHUNK, key_dim)
    _ends_kernel[(programs, of_keys)](
        d_output, *where, *kept, seen, left, behind, updates, d_query, d_ends, heads, key_dim,
        value_dim, keys, num_warps=4,
    )  # fmt: skip
    passed = torch.empty(n, heads, dtype=torch.float64, device=states.device)
    _passed_kernel[(programs,)](
        *kept, behind, seen, passed, heads, key_dim, value_dim, padded(value_dim), 16, num_warps=4
    )
    _gates_kernel[(programs,)](
        rows.q, rows.k, *where, betas, gamma, shared, read_by, told, wanted, d_wanted, d_read_by,
        d_overlap, d_query, d_ends, passed, dv_rows, d_decay, d_beta, heads, key_heads, key_dim,
        value_dim, keys, values, num_warps=8,
    )  # fmt: skip
    _chunk_keys_kernel[(programs, of_keys, parts)](
        rows.q, rows.k, *where, *kept, beta_seen, d_wanted, d_read_by, d_overlap, d_query, d_ends,
        dq_rows, dk_rows, heads, key_heads, key_dim, value_dim, keys, ROWS, num_warps=4,
    )  # fmt: skip
    return made
