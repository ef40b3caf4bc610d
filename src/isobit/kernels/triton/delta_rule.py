"""The gated delta rule on a GPU: one function in rollout and training, on one card bit for bit.

The formulas are those of ``isobit.kernels.spec.delta_rule``, with chunks of 64 tokens from a
sequence's start.  Sums differ: here each is one chain of ``fma`` in FP32, in ascending order.  With
S0 the state in front of a chunk, k_id number d of row i, and G_i the sum of g up to row i, row
after row:

    u_i    first  beta_i (v_i - exp(G_i) (S0^T k_i)),   then for j = 0 .. i - 1
           fma(-beta_i (exp(G_i - G_j) (k_i . k_j)), u_j, .)
    o_i    first  exp(G_i) (S0^T q_i),                  then for j = 0 .. i
           fma(exp(G_i - G_j) (q_i . k_j), u_j, .)
    S1_d   first  exp(G_63) S0_d,                       then for j = 0 .. 63
           fma(exp(G_63 - G_j) k_jd, u_j, .)

and S0^T k, k . k and their like begin with 0 and take d in ascending order.

**Bits.**  ``tl.dot`` of FP32 in IEEE precision is such a chain for each element by itself, whatever
the number of rows and wherever a sum is cut into several products; the sums over rows of a group
are the same chain written out.  So nothing but time depends on how many rows are computed at once,
which columns of dv a program has, or where a group begins.  Terms that a form has and another has
not are products of finite numbers with 0; they can change the sign of a zero alone, and results are
canonical (+ 0.0 makes -0 to 0).  No kernel may contract a product and a sum
(``enable_fp_fusion=False``); exp, of ex2.approx, is the same instruction everywhere.

**Work.**  G and the factors of u_j know no state: they are made for all chunks at once
(``isobit.kernels.triton.delta_factors``).  ``_walk_kernel`` has one program a sequence, value head
and block of dv, which walks its chunks; blocks repeat no product, so they are narrow, and one
sequence keeps a card busy: of 32 heads of 128 columns, 128 programs in prompts and in training.
ROWS new rows are computed at once: 16 for guesses, else whole chunks.  What rows take from those
before them, 16 rows at a time, is a product; the 16 take each other's terms row after row, a thread
for each column, and o is a product of all u.  Where each sequence has one new row, as in decoding,
the kernels are those of ``isobit.kernels.triton.delta_rule_rollout``.

FP32 products use no tensor cores.  A chunk and value head of 128 x 128 are 4.1 million ``fma``, in
four programs, and half a million of factors: about 145,000 operations a token and head.

**Carries.**  What a sequence goes on from is in a carry (``DeltaCarries``): S0, the keys, u and G
of its chunk, and its inputs behind the ``width`` - 1 in front of it.  New rows of the chunk that is
read go to its carry, those of the last chunk to the one that is written, with S0; of chunks in
between the state alone is there for a while, and u.  At a position that is a multiple of 64 the
chunk that is read is the previous one, whole, and S1 is computed by whoever writes row 0, so rows
that were rejected leave nothing.  In training no carry is read or written, and the states in front
of chunks are kept for the backward.

Shapes: T new tokens of n sequences, H value heads, H / r key heads (KH), heads of DK and DV.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DeltaShape
from isobit.kernels.spec.delta_rule import DeltaCarries
from isobit.kernels.triton.delta_factors import FEW_ROWS, chunks_of, keys_of, pieces, put_factors
from isobit.kernels.triton.delta_rows import CHUNK, DeltaBatch, DeltaRows, padded
from isobit.kernels.triton.sizes import FACTORS

_CHUNK = tl.constexpr(CHUNK)
_PART = tl.constexpr(16)  # rows of u that a thread solves at once


@triton.jit
def _products(
    q, k, state, exists, m, end, column, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """S0^T k and S0^T q of rows m, [ROWS, BV].  q and k are at row 0."""
    told = tl.zeros([ROWS, BV], tl.float32)
    output = tl.zeros([ROWS, BV], tl.float32)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)
        at = m[:, None] * (KH * DK) + d[None, :]
        inside = (m < end)[:, None] & (d < DK)[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        query = tl.load(q + at, mask=inside, other=0.0)
        at = d[:, None] * DV + column[None, :]
        is_there = (d < DK)[:, None] & (column < DV)[None, :] & exists
        s = tl.load(state + at, mask=is_there, other=0.0)
        told = tl.dot(key, s, told, input_precision="ieee")
        output = tl.dot(query, s, output, input_precision="ieee")
    return told, output


@triton.jit
def _add_known(
    total, factors, updates, start, stop, column, DV: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[ROWS, BV] sums of rows' chains with the terms of u_j, ``start`` <= j < ``stop``, behind
    them; ``factors`` are at the first of the rows.
    """
    row = tl.arange(0, ROWS)
    for first in range(start, stop, DEPTH):
        j = first + tl.arange(0, DEPTH)
        at = updates + j[:, None] * DV + column[None, :]
        u = tl.load(at, mask=(j < stop)[:, None] & (column < DV)[None, :], other=0.0)
        factor = factors + j[None, :] * GROUP + row[:, None]
        w = tl.load(factor, mask=(j < stop)[None, :], other=0.0)
        total = tl.dot(w, u, total, input_precision="ieee")
    return total


@triton.jit
def _pair(factors):
    """Two factors by one load, which all threads make."""
    both = tl.load(factors.to(tl.pointer_type(tl.int64), bitcast=True))
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _solve(factors, updates, count, column, DV: tl.constexpr, GROUP: tl.constexpr):
    """Turn the first ``count`` of a few rows at ``updates``, which lack the terms of one another,
    into u, a thread for each column, which takes two rows' chains at once.
    """
    u = ()
    for i in tl.static_range(0, _PART, 2):
        at = updates + i * DV + column
        one = tl.load(at, mask=(i < count) & (column < DV), other=0.0)
        two = tl.load(at + DV, mask=(i + 1 < count) & (column < DV), other=0.0)
        for j in tl.static_range(i):
            w = _pair(factors + j * GROUP + i)
            one = tl.math.fma(w[0], u[j], one)
            two = tl.math.fma(w[1], u[j], two)
        one += 0.0
        u += (one, tl.math.fma(tl.load(factors + i * GROUP + i + 1), one, two) + 0.0)
    for i in tl.static_range(_PART):
        tl.store(updates + i * DV + column, u[i], mask=(i < count) & (column < DV))


@triton.jit
def _put_updates(
    made, factors, updates, group, end, column, DV: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write u of the rows from ``group`` on, from the first terms of their chains [ROWS, BV]."""
    m = group + tl.arange(0, ROWS)
    to = updates + m[:, None] * DV + column[None, :]
    known = group * 0
    for some in range(0, tl.minimum(ROWS, end - group), _PART):
        first = group + some
        made = _add_known(made, factors, updates, known, first, column, DV, ROWS, GROUP, _PART)
        known = first
        is_its = (m >= first) & (m < tl.minimum(first + _PART, end))
        tl.store(to, made, mask=is_its[:, None] & (column < DV)[None, :])
        tl.debug_barrier()
        own = factors + first * GROUP + some
        _solve(own, updates + first * DV, end - first, column, DV, GROUP)
        tl.debug_barrier()


@triton.jit
def put_next_state(
    state, exists, following, k, held, updates, decays, old, end, start, stop, column,
    KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write rows ``start`` .. ``stop`` - 1 of S1 of a whole chunk, whose G is at ``decays``, from
    S0 at ``state`` or, where none exists, from zeros; zeros of a chunk of no rows.
    """
    inside = (column < DV)[None, :]
    final = tl.load(decays + _CHUNK - 1, mask=end == _CHUNK, other=0.0)
    for first in range(start, stop, BK):
        d = first + tl.arange(0, BK)
        at = d[:, None] * DV + column[None, :]
        is_its = (d < DK)[:, None] & inside
        s = tl.exp(final) * tl.load(state + at, mask=is_its & exists, other=0.0)
        for one in range(0, _CHUNK, DEPTH):
            j = one + tl.arange(0, DEPTH)
            keys = keys_of(k, held, old, j, end, d, KH, DK)
            total = tl.load(decays + j, mask=j < end, other=0.0)
            is_there = (j < end)[:, None] & inside
            u = tl.load(updates + j[:, None] * DV + column[None, :], mask=is_there, other=0.0)
            weights = tl.exp(final - total)[:, None] * keys
            s = tl.dot(tl.trans(weights), u, s, input_precision="ieee")
        tl.debug_barrier()  # S0 of these d is read before S1 takes its place
        tl.store(following + at, s + 0.0, mask=is_its)
    tl.debug_barrier()


@triton.jit
def _put_no_state(
    to, is_first, column, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr
):
    """Write the S0 of a sequence's first chunk, if it is that."""
    if is_first:
        zeros = tl.zeros([BK, BV], tl.float32)
        for first in range(0, DK, BK):
            d = first + tl.arange(0, BK)
            is_there = (d < DK)[:, None] & (column < DV)[None, :]
            tl.store(to + d[:, None] * DV + column[None, :], zeros, mask=is_there)


@triton.jit(do_not_specialize=["place", "chunks"])
def _walk_kernel(
    Q, K, V, BETA, POSITION, COUNT, TOKEN, READ, WORK, STATE, KEYS, UPDATES, STATES, FACTORS,
    TOTALS, OUT, place, chunks, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    MADE: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV columns of DV: ``chunks`` of its chunks from number
    ``place`` on, ROWS new rows at once.

    WORK is the carry written, and in training a row of UPDATES; READ is then not there, nor is
    KEYS, and the state in front of a sequence's chunk c > 0 is kept in STATES at STATE + c - 1.
    FACTORS and TOTALS are those of ``_factors_kernel``, of GROUP new rows.
    """
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (H // KH)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    position, stop, begin, last, read, work = chunks_of(n, POSITION, COUNT, READ, WORK)
    token = tl.load(TOKEN + n).to(tl.int64)
    is_paged: tl.constexpr = READ is not None
    held = None
    if is_paged:
        held = KEYS + (read * H + h) * (_CHUNK * DK)
    else:
        own = tl.load(STATE + n).to(tl.int64)
    for chunk in range(begin + place, tl.minimum(begin + place + chunks - 1, last) + 1):
        is_first = chunk == begin
        old = tl.where(is_first, position - begin * _CHUNK, 0)  # rows that the carry read holds
        end = tl.minimum(stop - chunk * _CHUNK, _CHUNK)
        if is_paged:
            here, following = tl.where(is_first, read, work), work
            kept = tl.where(is_first & (read >= 0), read, work)  # the carry of the new rows
        else:
            here, following = tl.where(is_first, -1, own + chunk - 1), own + chunk
            kept = work
        base = token + (chunk * _CHUNK - position)  # the token of row 0, if it is new
        q = Q + (base * KH + kh) * DK
        k = K + (base * KH + kh) * DK
        of_row = base * H + h
        state = STATES + (here * H + h) * (DK * DV)  # S0, or zeros where ``here`` is below 0
        updates = UPDATES + (kept * H + h) * (_CHUNK * DV)
        slot = (n * chunks + (chunk - begin - place)) * H + h
        factors = FACTORS + slot * (2 * _CHUNK * GROUP)
        decays = TOTALS + slot * _CHUNK
        for some in range(0, end - old, ROWS):
            group = old + some
            m = group + tl.arange(0, ROWS)
            told, output = _products(
                q, k, state, here >= 0, m, end, column, KH, DK, DV, ROWS, BV, BK
            )
            inside = (m < end)[:, None] & (column < DV)[None, :]
            at = m[:, None] * (H * DV) + column[None, :]
            v = tl.load(V + of_row * DV + at, mask=inside, other=0.0)
            beta = tl.load(BETA + of_row + m * H, mask=m < end, other=0.0)
            seen = tl.exp(tl.load(decays + m, mask=m < end, other=0.0))[:, None]
            made = beta[:, None] * (v - seen * told)
            _put_updates(made, factors + some, updates, group, end, column, DV, ROWS, GROUP)
            output = _add_known(
                seen * output, factors + _CHUNK * GROUP + some, updates, 0,
                tl.minimum(group + ROWS, end), column, DV, ROWS, GROUP, BK,
            )  # fmt: skip
            tl.store(OUT + of_row * DV + at, (output + 0.0).to(OUT.dtype.element_ty), mask=inside)
        if chunk < last:
            put_next_state(
                state, here >= 0, STATES + (following * H + h) * (DK * DV), k, held, updates,
                decays, old, end, 0, DK, column, KH, DK, DV, MADE, _PART,
            )  # fmt: skip
        elif is_paged:
            _put_no_state(STATES + (work * H + h) * (DK * DV), here < 0, column, DK, DV, BV, BK)


@dataclass(frozen=True, slots=True)
class RuleForm:
    """What a program of ``_walk_kernel`` computes at once, which is in no bit."""

    rows: int  # a multiple of 16
    columns: int  # of dv
    depth: int  # numbers of a key, or rows of u, that a product reads
    warps: int
    stages: int = 1  # operands of so many products are on their way at once
    made: int = 32  # rows of S1


FORMS = (
    RuleForm(FEW_ROWS, 64, 16, 8),
    RuleForm(CHUNK, 32, 32, 4, made=128),
)


def form_of(longest: int) -> RuleForm:
    """The form for at most so many new tokens of a sequence."""
    return FORMS[longest > FEW_ROWS]


@dataclass(frozen=True, slots=True)
class KeptStates:
    """States in front of the chunks of each sequence, without its first, which are zeros."""

    states: torch.Tensor  # FP32 [chunks, H, DK, DV]
    first: torch.Tensor  # int32 [n], the place of a sequence's second chunk


def apply_rule(
    rows: DeltaRows,
    shape: DeltaShape,
    batch: DeltaBatch,
    held: DeltaCarries | KeptStates,
    output: torch.Tensor,
    form: RuleForm | None = None,
) -> None:
    """Write o to the rows of ``batch``'s tokens in ``output`` [T, H DV], and what is kept of its
    sequences: to their carries, or in training their states.
    """
    form = form or form_of(batch.longest)
    heads, key_heads, sizes = shape.value_heads, shape.key_heads, (shape.key_dim, shape.value_dim)
    group = FEW_ROWS if batch.longest <= FEW_ROWS else CHUNK
    of_batch = list(pieces(batch.chunks, max(1, FACTORS // (heads * 2 * CHUNK * group))))
    most = max((last - first) * count for first, last, _, count in of_batch)
    factors = rows.v.new_empty(most, heads, 2, CHUNK, group), rows.v.new_empty(most, heads, CHUNK)
    own = updates = None
    if not isinstance(held, DeltaCarries):
        count = max(last - first for first, last, _, _ in of_batch)
        own = torch.arange(count, dtype=torch.int32, device=output.device)
        updates = rows.v.new_empty(count, heads, CHUNK, shape.value_dim)
    columns = min(form.columns, padded(shape.value_dim))
    depth = min(form.depth, padded(shape.key_dim))
    for first, last, place, count in of_batch:
        part = batch.part(first, last)
        if isinstance(held, DeltaCarries):
            places = part.read, part.written
            kept = None, held.keys, held.updates, held.states
            put_factors(rows, shape, part, places, held, (place, count), factors)
        else:
            places, kept = (None, own), (held.first[first:last], None, updates, held.states)
            put_factors(rows, shape, part, places, None, (place, count), factors)
        _walk_kernel[(last - first, heads, triton.cdiv(shape.value_dim, columns))](
            rows.q, rows.k, rows.v, rows.beta, part.positions, part.counts, part.tokens, *places,
            *kept, *factors, output, place, count, heads, key_heads, *sizes, group, form.rows,
            columns, depth, form.made, num_warps=form.warps, num_stages=form.stages,
            enable_fp_fusion=False,
        )  # fmt: skip
