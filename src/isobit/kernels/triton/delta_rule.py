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

**Work.**  ``_rule_kernel`` has one program a sequence, value head and block of dv, which walks its
chunks; ROWS new rows at once: 16 for guesses, 32 in prompts and in training.  A group's factors of
u_j are in global memory.  What rows take from those before them, 16 rows at a time, is a product;
the 16 take each other's terms row after row, a thread for each column, and o is a product of all u.
No more sequences are launched at once than have room there.  Where each sequence has one new row,
as in decoding, the kernels are those of ``isobit.kernels.triton.delta_rule_rollout``.
FP32 products use no tensor cores, and blocks of dv repeat what is of keys alone: about 200,000
operations a token and head of 128 x 128.

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
from isobit.kernels.triton.delta_rows import (
    CHUNK,
    DeltaBatch,
    DeltaRows,
    carried_chunk,
    padded,
)
from isobit.kernels.triton.sizes import FACTOR_COLUMNS, FACTOR_ROWS, FACTORS

_CHUNK = tl.constexpr(CHUNK)
_PART = tl.constexpr(16)  # rows of u that a product reads, or that a thread solves, at once


@triton.jit
def _keys(new, held, old, row, end, d, KH: tl.constexpr, DK: tl.constexpr):
    """FP32 [row, d]: rows of the chunk below ``old`` from the carry, whose head's keys begin at
    ``held``, those below ``end`` from the new tokens: at ``new`` is that of row 0, if it is one.
    """
    inside = (d < DK)[None, :]
    is_new = ((row >= old) & (row < end))[:, None]
    at = row[:, None] * (KH * DK) + d[None, :]
    keys = tl.load(new + at, mask=is_new & inside, other=0.0)
    if held is not None:
        at = row[:, None] * DK + d[None, :]
        is_old = (row < old)[:, None]
        keys = tl.where(is_old, tl.load(held + at, mask=is_old & inside, other=0.0), keys)
    return keys


@triton.jit
def _of_rows(x, row, wanted):
    """x [row] at the rows ``wanted``, which are among them."""
    return tl.sum(tl.where(wanted[:, None] == row[None, :], x[None, :], 0.0), 1)


@triton.jit
def _products(
    q, k, held, state, exists, old, m, end, column, KH: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k . k_j and q . k_j of rows m with all rows of their chunk, [ROWS, 64]; S0^T k and S0^T q,
    [ROWS, BV].  q and k are at row 0.
    """
    row = tl.arange(0, _CHUNK)
    depth = tl.arange(0, BK)
    between = tl.zeros([ROWS, _CHUNK], tl.float32)
    read_by = tl.zeros([ROWS, _CHUNK], tl.float32)
    told = tl.zeros([ROWS, BV], tl.float32)
    output = tl.zeros([ROWS, BV], tl.float32)
    for first in range(0, DK, BK):
        d = first + depth
        at = d[:, None] * DV + column[None, :]
        is_there = (d < DK)[:, None] & (column < DV)[None, :] & exists
        s = tl.load(state + at, mask=is_there, other=0.0)
        keys = tl.trans(_keys(k, held, old, row, end, d, KH, DK))
        at = m[:, None] * (KH * DK) + d[None, :]
        inside = (m < end)[:, None] & (d < DK)[None, :]
        one = tl.load(k + at, mask=inside, other=0.0)
        between = tl.dot(one, keys, between, input_precision="ieee")
        told = tl.dot(one, s, told, input_precision="ieee")
        one = tl.load(q + at, mask=inside, other=0.0)
        read_by = tl.dot(one, keys, read_by, input_precision="ieee")
        output = tl.dot(one, s, output, input_precision="ieee")
    return between, read_by, told, output


@triton.jit
def _put_factors(between, read_by, beta, decays, to, m, ROWS: tl.constexpr):
    """Write the factors of each u_j in the chains of rows m, [64, ROWS], those of u and then those
    of o; -> G of the rows.
    """
    row = tl.arange(0, _CHUNK)
    totals = _of_rows(decays, row, tl.minimum(m, _CHUNK - 1))
    distance = totals[:, None] - decays[None, :]
    decay = tl.exp(tl.where(distance > 0.0, 0.0, distance))  # only of later rows above 0
    taken = -(beta[:, None] * (decay * between))
    taken = tl.where(row[None, :] < m[:, None], taken, 0.0)
    given = tl.where(row[None, :] <= m[:, None], decay * read_by, 0.0)
    at = row[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.debug_barrier()  # those of the rows before are still read
    tl.store(to + at, taken)
    tl.store(to + _CHUNK * ROWS + at, given)
    tl.debug_barrier()
    return totals


@triton.jit
def _add_known(total, factors, updates, start, stop, column, DV: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, BV] sums of a group's chains with the terms of u_j, ``start`` <= j < ``stop``, behind
    them.
    """
    group_row = tl.arange(0, ROWS)
    part = tl.arange(0, _PART)
    for first in range(start, stop, _PART):
        j = first + part
        at = updates + j[:, None] * DV + column[None, :]
        u = tl.load(at, mask=(j < stop)[:, None] & (column < DV)[None, :], other=0.0)
        factor = factors + j[None, :] * ROWS + group_row[:, None]
        w = tl.load(factor, mask=(j < stop)[None, :], other=0.0)
        total = tl.dot(w, u, total, input_precision="ieee")
    return total


@triton.jit
def _solve(factors, updates, count, column, DV: tl.constexpr, ROWS: tl.constexpr):
    """Turn the first ``count`` of a few rows at ``updates``, which lack the terms of one another,
    into u, a thread for each column.
    """
    u = ()
    for i in tl.static_range(_PART):
        is_there = (i < count) & (column < DV)
        one = tl.load(updates + i * DV + column, mask=is_there, other=0.0)
        for j in tl.static_range(i):
            one = tl.math.fma(tl.load(factors + j * ROWS + i), u[j], one)
        u += (one + 0.0,)
    for i in tl.static_range(_PART):
        tl.store(updates + i * DV + column, u[i], mask=(i < count) & (column < DV))


@triton.jit
def _put_updates(made, factors, updates, group, end, column, DV: tl.constexpr, ROWS: tl.constexpr):
    """Write u of the rows from ``group`` on, from the first terms of their chains [ROWS, BV]."""
    m = group + tl.arange(0, ROWS)
    to = updates + m[:, None] * DV + column[None, :]
    made = _add_known(made, factors, updates, 0, group, column, DV, ROWS)
    for some in tl.static_range(0, ROWS, _PART):
        first = group + some
        known = tl.minimum(first, end)
        if some > 0:
            made = _add_known(made, factors, updates, first - _PART, known, column, DV, ROWS)
        is_its = (m >= first) & (m < tl.minimum(first + _PART, end))
        tl.store(to, made, mask=is_its[:, None] & (column < DV)[None, :])
        tl.debug_barrier()
        own = factors + first * ROWS + some
        _solve(own, updates + first * DV, end - first, column, DV, ROWS)
        tl.debug_barrier()


@triton.jit
def put_next_state(
    state, exists, following, k, held, updates, decays, old, end, start, stop, column,
    KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write rows ``start`` .. ``stop`` - 1 of S1 of a whole chunk, from S0 at ``state`` or, where
    none exists, from zeros; zeros of a chunk of no rows.
    """
    row = tl.arange(0, _CHUNK)
    part = tl.arange(0, _PART)
    depth = tl.arange(0, BK)
    inside = (column < DV)[None, :]
    final = tl.sum(tl.where(row == _CHUNK - 1, decays, 0.0), 0)
    for first in range(start, stop, BK):
        d = first + depth
        at = d[:, None] * DV + column[None, :]
        is_its = (d < DK)[:, None] & inside
        s = tl.exp(final) * tl.load(state + at, mask=is_its & exists, other=0.0)
        for one in range(0, _CHUNK, _PART):
            j = one + part
            keys = _keys(k, held, old, j, end, d, KH, DK)
            weights = tl.exp(final - _of_rows(decays, row, j))[:, None] * keys
            is_there = (j < end)[:, None] & inside
            u = tl.load(updates + j[:, None] * DV + column[None, :], mask=is_there, other=0.0)
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
        depth = tl.arange(0, BK)
        zeros = tl.zeros([BK, BV], tl.float32)
        for first in range(0, DK, BK):
            d = first + depth
            is_there = (d < DK)[:, None] & (column < DV)[None, :]
            tl.store(to + d[:, None] * DV + column[None, :], zeros, mask=is_there)


@triton.jit
def _put_keys(
    k, is_kept, to, decays, to_decays, old, end, KH: tl.constexpr, DK: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Keys and G of the new rows of a chunk, to its carry, if it is kept."""
    if is_kept & (tl.program_id(2) == 0):
        row = tl.arange(0, _CHUNK)
        depth = tl.arange(0, BK)
        is_new = (row >= old) & (row < end)
        for first in range(0, DK, BK):
            d = first + depth
            inside = is_new[:, None] & (d < DK)[None, :]
            keys = tl.load(k + row[:, None] * (KH * DK) + d[None, :], mask=inside, other=0.0)
            tl.store(to + row[:, None] * DK + d[None, :], keys, mask=inside)
        tl.store(to_decays + row, decays, mask=is_new)


@triton.jit
def _rule_kernel(
    Q, K, V, DECAY, BETA, POSITION, COUNT, TOKEN, READ, WORK, STATE, KEYS, UPDATES, DECAYS, STATES,
    FACTORS, OUT, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, MADE: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV columns of DV.

    WORK is the carry written, and in training a row of UPDATES; READ is then not there, nor are
    KEYS and DECAYS, and the state in front of a sequence's chunk c > 0 is kept in STATES at STATE +
    c - 1.  FACTORS [program, 2, 64, ROWS] is for the program alone.
    """
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (H // KH)
    row = tl.arange(0, _CHUNK)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    program = (n * H + h) * tl.num_programs(2) + tl.program_id(2)
    factors = FACTORS + program * (2 * _CHUNK * ROWS)
    position = tl.load(POSITION + n)
    count = tl.load(COUNT + n)
    stop = position + count
    token = tl.load(TOKEN + n).to(tl.int64)
    work = tl.load(WORK + n).to(tl.int64)
    is_paged: tl.constexpr = READ is not None
    if is_paged:
        read = tl.load(READ + n).to(tl.int64)
        begin = carried_chunk(position, stop, read == work)
        old = position - begin * _CHUNK  # rows of the chunk that the carry read holds
        held = KEYS + (read * H + h) * (_CHUNK * DK)
        held_decays = DECAYS + (read * H + h) * _CHUNK
        decays = tl.load(held_decays + row, mask=row < old, other=0.0)
        total = tl.load(held_decays + old - 1, mask=old > 0, other=0.0)
        of_chunk = tl.where(read < 0, work, read)  # the carry that new rows of the chunk go to
    else:
        read = tl.full([], -1, tl.int64)
        begin = carried_chunk(position, stop, False)
        old = position - begin * _CHUNK
        held = None
        decays = tl.zeros([_CHUNK], tl.float32)
        total = tl.sum(decays, 0)
        of_chunk = work
    last = tl.where(count > 0, (stop - 1) // _CHUNK, begin - 1)
    here = read  # the row of STATES with the chunk's S0; -1 for zeros
    for chunk in range(begin, last + 1):
        base = token + (chunk * _CHUNK - position)  # the token of row 0, if it is new
        q = Q + (base * KH + kh) * DK
        k = K + (base * KH + kh) * DK
        of_row = base * H + h
        state = STATES + (here * H + h) * (DK * DV)
        updates = UPDATES + (of_chunk * H + h) * (_CHUNK * DV)
        end = tl.minimum(stop - chunk * _CHUNK, _CHUNK)
        for i in tl.static_range(_CHUNK):  # all are read at once, and added one by one
            is_new = (i >= old) & (i < end)
            total += tl.load(DECAY + of_row + i * H, mask=is_new, other=0.0)
            decays = tl.where(is_new & (row == i), total, decays)
        for group in range(old, end, ROWS):
            m = group + tl.arange(0, ROWS)
            beta = tl.load(BETA + of_row + m * H, mask=m < end, other=0.0)
            between, read_by, told, output = _products(
                q, k, held, state, here >= 0, old, m, end, column, KH, DK, DV, ROWS, BV, BK
            )
            totals = _put_factors(between, read_by, beta, decays, factors, m, ROWS)
            inside = (m < end)[:, None] & (column < DV)[None, :]
            at = m[:, None] * (H * DV) + column[None, :]
            v = tl.load(V + of_row * DV + at, mask=inside, other=0.0)
            seen = tl.exp(totals)[:, None]
            made = beta[:, None] * (v - seen * told)
            _put_updates(made, factors, updates, group, end, column, DV, ROWS)
            known = tl.minimum(group + ROWS, end)
            output = _add_known(
                seen * output, factors + _CHUNK * ROWS, updates, 0, known, column, DV, ROWS
            )
            tl.store(OUT + of_row * DV + at, (output + 0.0).to(OUT.dtype.element_ty), mask=inside)
        if is_paged:
            is_kept = (chunk == last) | (of_chunk != work)
            to_keys = KEYS + (of_chunk * H + h) * (_CHUNK * DK)
            to_decays = DECAYS + (of_chunk * H + h) * _CHUNK
            _put_keys(k, is_kept, to_keys, decays, to_decays, old, end, KH, DK, BK)
        if chunk < last:
            following = work
            if not is_paged:
                following = tl.load(STATE + n).to(tl.int64) + chunk
            to = STATES + (following * H + h) * (DK * DV)
            put_next_state(
                state, here >= 0, to, k, held, updates, decays, old, end, 0, DK, column, KH, DK, DV,
                MADE,
            )  # fmt: skip
            here, of_chunk = following, work
            decays = tl.zeros([_CHUNK], tl.float32)
            total = tl.sum(decays, 0)
            old = old * 0
        elif is_paged:
            _put_no_state(STATES + (work * H + h) * (DK * DV), here < 0, column, DK, DV, BV, BK)


@dataclass(frozen=True, slots=True)
class RuleForm:
    """What a program of ``_rule_kernel`` computes at once, which is in no bit."""

    rows: int  # a multiple of 16
    columns: int  # of dv
    depth: int  # numbers of a key that a product reads
    warps: int
    stages: int = 1  # operands of so many products are on their way at once
    made: int = 32  # rows of S1


FORMS = (
    RuleForm(16, 64, 16, 8),
    RuleForm(FACTOR_ROWS, FACTOR_COLUMNS, 16, 8),
)


def form_of(longest: int) -> RuleForm:
    """The form for at most so many new tokens of a sequence."""
    return next((form for form in FORMS if form.rows >= longest), FORMS[-1])


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
    count, heads = len(batch.positions), shape.value_heads
    columns = min(form.columns, padded(shape.value_dim))
    blocks = triton.cdiv(shape.value_dim, columns)
    of_sequence = heads * blocks * 2 * CHUNK * form.rows
    at_once = min(count, max(1, FACTORS // of_sequence))
    factors = rows.v.new_empty(at_once, of_sequence)
    own = updates = None
    if not isinstance(held, DeltaCarries):
        own = torch.arange(at_once, dtype=torch.int32, device=output.device)
        updates = rows.v.new_empty(at_once, heads, CHUNK, shape.value_dim)
    for first in range(0, count, at_once):
        part = batch.part(first, first + at_once)
        if isinstance(held, DeltaCarries):
            places = part.read, part.written, None
            kept = held.keys, held.updates, held.decays, held.states
        else:
            places = None, own, held.first[first : first + at_once]
            kept = None, updates, None, held.states
        _rule_kernel[(len(part.positions), heads, blocks)](
            rows.q, rows.k, rows.v, rows.decay, rows.beta, part.positions, part.counts,
            part.tokens, *places, *kept, factors, output, heads, shape.key_heads, shape.key_dim,
            shape.value_dim, form.rows, columns, min(form.depth, padded(shape.key_dim)), form.made,
            num_warps=form.warps, num_stages=form.stages, enable_fp_fusion=False,
        )  # fmt: skip
