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
not are products with 0; they can change the sign of a zero alone, and results are canonical (+ 0.0
makes -0 to 0).  No kernel may contract a product and a sum (``enable_fp_fusion=False``); exp, of
ex2.approx, is the same instruction everywhere.

**Work.**  ``_rule_kernel`` has one program a sequence, value head and block of dv, which walks its
chunks; ROWS new rows at once: 1 in decoding, 16 for guesses, 64 in prompts and in training.  A
group's factors of u_j are in global memory, where each step of the chain reads one column.
FP32 products use no tensor cores: 140,000 operations a token and head of 128 x 128.

**Slots.**  What a sequence goes on from is in a slot (``DeltaSlots``): S0, the keys, u and G of the
open chunk, and its inputs behind the ``width`` - 1 in front of it.  At a position that is a
multiple of 64 the open chunk is the previous one, whole, and S1 is computed by whoever writes row
0, so rows that were rejected leave nothing.  In training no slot is read or written, and the states
in front of chunks are kept for the backward.

Shapes: T new tokens of n sequences, H value heads, H / r key heads (KH), heads of DK and DV.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DeltaInputs, DeltaShape, DeltaWeights
from isobit.kernels.triton.memory import to_device

CHUNK = 64
_CHUNK = tl.constexpr(CHUNK)
_EPSILON = tl.constexpr(1e-6)  # of the lengths of q and k
STEPS = 128  # numbers of g that a program makes
VECTORS = 8  # heads that a program makes
_PART = tl.constexpr(16)  # rows of u that a product reads at once


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to FP32's accuracy also where it is small (log1p by Kahan's quotient)."""
    small = tl.exp(-tl.abs(x))
    sum = 1.0 + small
    is_one = sum == 1.0
    more = tl.log(sum) * (small / tl.where(is_one, 1.0, sum - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_one, small, more)


@triton.jit
def _open_chunk(position):
    """The chunk that a slot holds in front of a position: at a multiple of 64 the one before."""
    return tl.maximum(position - 1, 0) // _CHUNK


@triton.jit
def _sums_of_squares(x, VECTORS: tl.constexpr, LEVELS: tl.constexpr):
    """FP32 [VECTORS, 2^LEVELS] -> [VECTORS, 1], two neighbours at a time, so in any layout the
    same: the forms of the kernel with and without slots may have others.
    """
    x = x * x
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [VECTORS, 1 << (LEVELS - level - 1), 2]), 2)
    return x


@triton.jit(do_not_specialize=["tokens"])
def _steps_kernel(
    A, B, A_LOG, DT_BIAS, DECAY, BETA, tokens, H: tl.constexpr, SIZE: tl.constexpr
):
    """One program SIZE numbers of g and beta."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < tokens * H
    rate = tl.exp(tl.load(A_LOG + place % H).to(tl.float32))
    step = tl.load(A + place, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(DT_BIAS + place % H).to(tl.float32)
    tl.store(DECAY + place, -rate * _softplus(step), mask=inside)
    b = tl.load(B + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(BETA + place, sigmoid(b), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _rows_kernel(
    X, CONVOLUTION, OWNER, POSITION, COUNT, TOKEN, READ, WRITTEN, INPUTS, Q, K, V, tokens,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS: tl.constexpr, VECTORS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """One program VECTORS heads of q and k, or of v, of one token and the next, padded to
    2^LEVELS numbers; ROOT is 1 / sqrt(DK).  INPUTS, READ and WRITTEN may be None.
    """
    channels: tl.constexpr = 2 * KH * DK + H * DV
    held: tl.constexpr = _CHUNK + WIDTH - 1  # inputs of a slot
    program = tl.program_id(0).to(tl.int64)
    of_keys = (tokens * (2 * KH) + VECTORS - 1) // VECTORS
    is_key = program < of_keys
    size = tl.where(is_key, DK, DV)
    heads = tl.where(is_key, 2 * KH, H)
    vector = tl.where(is_key, program, program - of_keys) * VECTORS
    vector += tl.arange(0, VECTORS)[:, None]
    t = vector // heads
    head = (vector % heads).to(tl.int32)
    i = tl.arange(0, 1 << LEVELS)[None, :]
    is_there = t < tokens
    inside = is_there & (i < size)
    channel = tl.where(is_key, 0, 2 * KH * DK) + head * size + i
    n = tl.load(OWNER + t, mask=is_there, other=0)
    position = tl.load(POSITION + n)
    row = (t - tl.load(TOKEN + n)).to(tl.int32)  # among the new ones
    total = tl.zeros([VECTORS, 1 << LEVELS], tl.float32)
    if INPUTS is not None:
        read = tl.load(READ + n).to(tl.int64)
        shift = WIDTH - 1 - _open_chunk(position) * _CHUNK  # position -> row of the slot read
        source = INPUTS + (read * held + shift) * channels + channel
    for place in tl.static_range(WIDTH):
        back = WIDTH - 1 - place
        x = tl.load(X + (t - back) * channels + channel, mask=inside & (row >= back), other=0.0)
        if INPUTS is not None:
            seen = position + row - back
            before = inside & (row < back) & (seen >= 0)
            x = tl.where(before, tl.load(source + seen * channels, mask=before, other=0.0), x)
        factor = tl.load(CONVOLUTION + channel * WIDTH + place, mask=inside, other=0.0)
        term = x.to(tl.float32) * factor.to(tl.float32)
        total = term if place == 0 else total + term
    active = silu(total.to(X.dtype.element_ty).to(tl.float32))
    if is_key:
        unit = active * tl.rsqrt(_sums_of_squares(active, VECTORS, LEVELS) + _EPSILON)
        of_head = (t * KH + head) * DK + i
        tl.store(Q + of_head, unit * ROOT, mask=inside & (head < KH))
        tl.store(K + of_head - KH * DK, unit, mask=inside & (head >= KH))
    else:
        tl.store(V + (t * H + head) * DV + i, active, mask=inside)
    if INPUTS is not None:
        written = tl.load(WRITTEN + n).to(tl.int64)
        stop = position + tl.load(COUNT + n)
        begin = (stop - 1) // _CHUNK * _CHUNK - (WIDTH - 1)  # of the slot written
        to = INPUTS + written * held * channels + channel
        own = position + row - begin
        x = tl.load(X + t * channels + channel, mask=inside, other=0.0)
        tl.store(to + own * channels, x, mask=inside & (own >= 0))
        moves = is_there & (row == 0) & (read != written)  # then what is before moves too
        for old in range(0, tl.max(tl.where(moves, position - begin, 0))):
            seen = begin + old
            copied = inside & moves & (seen < position)
            x = tl.load(source + seen * channels, mask=copied & (seen >= 0), other=0.0)
            tl.store(to + old * channels, x, mask=copied)


@triton.jit
def _keys(new, held, old, row, end, d, KH: tl.constexpr, DK: tl.constexpr, PAGED: tl.constexpr):
    """FP32 [row, d]: rows of the chunk below ``old`` from the slot, whose head's keys begin at
    ``held``, those below ``end`` from the new tokens: at ``new`` is that of row 0, if it is one.
    """
    inside = (d < DK)[None, :]
    is_new = ((row >= old) & (row < end))[:, None]
    at = row[:, None] * (KH * DK) + d[None, :]
    keys = tl.load(new + at, mask=is_new & inside, other=0.0)
    if PAGED:
        at = row[:, None] * DK + d[None, :]
        is_old = (row < old)[:, None]
        keys = tl.where(is_old, tl.load(held + at, mask=is_old & inside, other=0.0), keys)
    return keys


@triton.jit
def _of_rows(x, row, wanted):
    """x [row] at the rows ``wanted``, which are among them."""
    return tl.sum(tl.where(wanted[:, None] == row[None, :], x[None, :], 0.0), 1)


@triton.jit
def _rule_kernel(
    Q, K, V, DECAY, BETA, POSITION, COUNT, TOKEN, READ, WORK, STATE, KEYS, UPDATES, DECAYS, STATES,
    FACTORS, OUT, H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV columns of DV.

    WORK is the slot written, and in training a row of UPDATES; READ is then not there, nor are KEYS
    and DECAYS, and the state in front of a sequence's chunk c > 0 is kept in STATES at STATE + c -
    1. FACTORS [program, 2, 64, ROWS] is for the program alone.
    """
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (H // KH)
    row = tl.arange(0, _CHUNK)
    part = tl.arange(0, _PART)
    depth = tl.arange(0, BK)
    group_row = tl.arange(0, ROWS)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (column < DV)[None, :]
    program = (n * H + h) * tl.num_programs(2) + tl.program_id(2)
    factors = FACTORS + program * (2 * _CHUNK * ROWS)
    position = tl.load(POSITION + n)
    stop = position + tl.load(COUNT + n)
    token = tl.load(TOKEN + n).to(tl.int64)
    work = tl.load(WORK + n).to(tl.int64)
    updates = UPDATES + (work * H + h) * (_CHUNK * DV)
    is_paged: tl.constexpr = READ is not None
    read = tl.full([], -1, tl.int64)
    if is_paged:
        read = tl.load(READ + n).to(tl.int64)
    held_keys = None
    if is_paged:
        held_keys = KEYS + (read * H + h) * (_CHUNK * DK)
    begin = _open_chunk(position)
    last = (stop - 1) // _CHUNK
    old = position - begin * _CHUNK  # rows of the chunk that the slot read holds
    decays = tl.zeros([_CHUNK], tl.float32)
    total = tl.sum(decays, 0)
    if is_paged:
        held = DECAYS + (read * H + h) * _CHUNK
        decays = tl.load(held + row, mask=row < old, other=0.0)
        total = tl.load(held + old - 1, mask=old > 0, other=0.0)
        if (read != work) & (old > 0):
            at = row[:, None] * DV + column[None, :]
            is_old = (row < old)[:, None] & inside
            source = UPDATES + (read * H + h) * (_CHUNK * DV)
            tl.store(updates + at, tl.load(source + at, mask=is_old), mask=is_old)
            tl.debug_barrier()
    state = read  # the row of STATES with the chunk's S0; -1 for zeros
    for chunk in range(begin, last + 1):
        base = token + (chunk * _CHUNK - position)  # the token of row 0, if it is new
        new_keys = K + (base * KH + kh) * DK
        new_queries = Q + (base * KH + kh) * DK
        of_row = base * H + h
        state_here = STATES + (state * H + h) * (DK * DV)
        end = tl.minimum(stop - chunk * _CHUNK, _CHUNK)
        for i in range(old, end):
            total += tl.load(DECAY + of_row + i * H)
            decays = tl.where(row == i, total, decays)
        for group in range(old, end, ROWS):
            m = group + group_row
            there = m < end
            between = tl.zeros([ROWS, _CHUNK], tl.float32)
            read_by = tl.zeros([ROWS, _CHUNK], tl.float32)
            for first in range(0, DK, BK):
                d = first + depth
                at_key = m[:, None] * (KH * DK) + d[None, :]
                is_key = there[:, None] & (d < DK)[None, :]
                keys = tl.trans(_keys(new_keys, held_keys, old, row, end, d, KH, DK, is_paged))
                k = tl.load(new_keys + at_key, mask=is_key, other=0.0)
                between = tl.dot(k, keys, between, input_precision="ieee")
                q = tl.load(new_queries + at_key, mask=is_key, other=0.0)
                read_by = tl.dot(q, keys, read_by, input_precision="ieee")
            totals = _of_rows(decays, row, tl.minimum(m, _CHUNK - 1))
            distance = totals[:, None] - decays[None, :]
            decay = tl.exp(tl.where(distance > 0.0, 0.0, distance))  # only of later rows above 0
            beta = tl.load(BETA + of_row + m * H, mask=there, other=0.0)
            taken = -(beta[:, None] * (decay * between))
            taken = tl.where(row[None, :] < m[:, None], taken, 0.0)
            given = tl.where(row[None, :] <= m[:, None], decay * read_by, 0.0)
            to = factors + row[None, :] * ROWS + group_row[:, None]
            tl.debug_barrier()  # those of the group before are still read
            tl.store(to, taken)
            tl.store(to + _CHUNK * ROWS, given)
            tl.debug_barrier()
            told = tl.zeros([ROWS, BV], tl.float32)
            output = tl.zeros([ROWS, BV], tl.float32)
            for first in range(0, DK, BK):
                d = first + depth
                at_key = m[:, None] * (KH * DK) + d[None, :]
                is_key = there[:, None] & (d < DK)[None, :]
                at_state = d[:, None] * DV + column[None, :]
                is_there = (d < DK)[:, None] & inside & (state >= 0)
                s = tl.load(state_here + at_state, mask=is_there, other=0.0)
                k = tl.load(new_keys + at_key, mask=is_key, other=0.0)
                told = tl.dot(k, s, told, input_precision="ieee")
                q = tl.load(new_queries + at_key, mask=is_key, other=0.0)
                output = tl.dot(q, s, output, input_precision="ieee")
            at_values = m[:, None] * (H * DV) + column[None, :]
            v = tl.load(V + of_row * DV + at_values, mask=there[:, None] & inside, other=0.0)
            seen = tl.exp(totals)[:, None]
            made = beta[:, None] * (v - seen * told)
            output = seen * output
            for first in range(0, group, _PART):
                j = first + part
                known = updates + j[:, None] * DV + column[None, :]
                u = tl.load(known, mask=(j < group)[:, None] & inside, other=0.0)
                factor = factors + j[None, :] * ROWS + group_row[:, None]
                is_known = (j < group)[None, :]
                w = tl.load(factor, mask=is_known, other=0.0)
                made = tl.dot(w, u, made, input_precision="ieee")
                w = tl.load(factor + _CHUNK * ROWS, mask=is_known, other=0.0)
                output = tl.dot(w, u, output, input_precision="ieee")
            for one in range(0, tl.minimum(end - group, ROWS)):
                last_made = tl.sum(tl.where((group_row == one)[:, None], made, 0.0), 0) + 0.0
                last_made = tl.broadcast_to(last_made[None, :], made.shape)
                own_factor = factors + (group + one) * ROWS + group_row
                w = tl.broadcast_to(tl.load(own_factor)[:, None], made.shape)
                later = tl.math.fma(w, last_made, made)
                made = tl.where((group_row > one)[:, None], later, made)
                w = tl.load(own_factor + _CHUNK * ROWS)[:, None]
                later = tl.math.fma(tl.broadcast_to(w, made.shape), last_made, output)
                output = tl.where((group_row >= one)[:, None], later, output)
            made += 0.0
            output = (output + 0.0).to(OUT.dtype.element_ty)
            tl.store(OUT + of_row * DV + at_values, output, mask=there[:, None] & inside)
            to = updates + m[:, None] * DV + column[None, :]
            tl.store(to, made, mask=there[:, None] & inside)
            tl.debug_barrier()
        if chunk < last:
            following = work
            if not is_paged:
                following = tl.load(STATE + n).to(tl.int64) + chunk
            final = tl.sum(tl.where(row == _CHUNK - 1, decays, 0.0), 0)
            for first in range(0, DK, BK):
                d = first + depth
                at_state = d[:, None] * DV + column[None, :]
                is_there = (d < DK)[:, None] & inside
                s = tl.load(state_here + at_state, mask=is_there & (state >= 0), other=0.0)
                s = tl.exp(final) * s
                for one in range(0, _CHUNK, _PART):
                    j = one + part
                    keys = _keys(new_keys, held_keys, old, j, end, d, KH, DK, is_paged)
                    weights = tl.exp(final - _of_rows(decays, row, j))[:, None] * keys
                    u = tl.load(updates + j[:, None] * DV + column[None, :], mask=inside, other=0.0)
                    s = tl.dot(tl.trans(weights), u, s, input_precision="ieee")
                tl.debug_barrier()  # S0 of these d is read before S1 takes its place
                state_next = STATES + (following * H + h) * (DK * DV)
                tl.store(state_next + at_state, s + 0.0, mask=is_there)
            tl.debug_barrier()
            state = following
            decays = tl.zeros([_CHUNK], tl.float32)
            total = tl.sum(decays, 0)
            old = old * 0
        elif is_paged:
            lowest = tl.where(read == work, old, 0)  # rows below are there already
            is_new = (row >= lowest) & (row < end)
            for first in range(0, DK, BK):
                d = first + depth
                if tl.program_id(2) == 0:
                    keys = _keys(new_keys, held_keys, old, row, end, d, KH, DK, is_paged)
                    to = KEYS + (work * H + h) * (_CHUNK * DK) + row[:, None] * DK + d[None, :]
                    tl.store(to, keys, mask=is_new[:, None] & (d < DK)[None, :])
                if state != work:
                    at_state = d[:, None] * DV + column[None, :]
                    is_there = (d < DK)[:, None] & inside
                    s = tl.load(state_here + at_state, mask=is_there & (state >= 0), other=0.0)
                    state_written = STATES + (work * H + h) * (DK * DV)
                    tl.store(state_written + at_state, s, mask=is_there)
            if tl.program_id(2) == 0:
                tl.store(DECAYS + (work * H + h) * _CHUNK + row, decays, mask=is_new)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What rows are computed from, FP32: q and k [T, KH, DK], v [T, H, DV], decay g and beta [T,
    H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


class DeltaSlots:
    """What sequences go on from in one layer, a slot each."""

    def __init__(
        self, shape: DeltaShape, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Zeros; ``dtype`` is that of x."""

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(slots, *sizes, dtype=dtype, device=device)

        heads = shape.value_heads
        self.inputs = zeros(CHUNK + shape.width - 1, shape.channels, dtype=dtype)
        self.keys = zeros(heads, CHUNK, shape.key_dim)
        self.updates = zeros(heads, CHUNK, shape.value_dim)
        self.decays = zeros(heads, CHUNK)
        self.states = zeros(heads, shape.key_dim, shape.value_dim)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Of each the first dimension is slots."""
        return self.inputs, self.keys, self.updates, self.decays, self.states


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """New tokens of n sequences; int32 [n] on the device."""

    positions: torch.Tensor  # of the first new token
    counts: torch.Tensor  # new tokens
    tokens: torch.Tensor  # the row of the first one among the tokens of all sequences
    read: torch.Tensor | None  # the slot that a sequence goes on from; -1 where it begins
    written: torch.Tensor | None
    """The slot of its last row.  It is the slot read only where that holds the same chunk.  None,
    as ``read``, in training, which has no slots.
    """
    longest: int  # a bound of the counts

    def sequences(self, index: torch.Tensor, longest: int) -> "DeltaBatch":
        """Some of them, int64 on the device."""

        def some(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.index_select(0, index)

        places = (x.index_select(0, index) for x in (self.positions, self.counts, self.tokens))
        return DeltaBatch(*places, some(self.read), some(self.written), longest)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def rows_of(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    batch: DeltaBatch,
    owners: torch.Tensor,
    slots: DeltaSlots | None,
) -> DeltaRows:
    """Convolution, silu, norms, decay and beta of new tokens, whose x go to the slots written;
    ``owners`` int32 [T], the sequence of each token.
    """
    shape, tokens, x = weights.shape, len(inputs.x), inputs.x
    heads, key_heads = shape.value_heads, shape.key_heads

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(tokens, *sizes, dtype=torch.float32, device=x.device)

    rows = DeltaRows(
        empty(key_heads, shape.key_dim), empty(key_heads, shape.key_dim),
        empty(heads, shape.value_dim), empty(heads), empty(heads),
    )  # fmt: skip
    _steps_kernel[(triton.cdiv(tokens * heads, STEPS),)](
        inputs.a, inputs.b, weights.a_log, weights.dt_bias, rows.decay, rows.beta, tokens, heads,
        STEPS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    vectors = triton.cdiv(tokens * 2 * key_heads, VECTORS) + triton.cdiv(tokens * heads, VECTORS)
    _rows_kernel[(vectors,)](
        x, weights.convolution, owners, batch.positions, batch.counts, batch.tokens, batch.read,
        batch.written, None if slots is None else slots.inputs, rows.q, rows.k, rows.v, tokens,
        heads, key_heads, shape.key_dim, shape.value_dim, shape.width,
        _padded(max(shape.key_dim, shape.value_dim)).bit_length() - 1, VECTORS, shape.key_dim**-0.5,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class Form:
    """What a program computes at once, which is in no bit."""

    rows: int
    columns: int  # of dv
    depth: int  # numbers of a key that a product reads
    warps: int


FORMS = Form(1, 128, 32, 8), Form(16, 64, 16, 8), Form(CHUNK, 64, 16, 8)


def form_of(longest: int) -> Form:
    """That for at most so many new tokens of a sequence."""
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
    held: DeltaSlots | KeptStates,
    output: torch.Tensor,
    form: Form | None = None,
) -> None:
    """Write o to the rows of ``batch``'s tokens in ``output`` [T, H DV], and what is kept of its
    sequences: to their slots, or in training their states.
    """
    form = form or form_of(batch.longest)
    count, heads = len(batch.positions), shape.value_heads
    columns = min(form.columns, _padded(shape.value_dim))
    blocks = triton.cdiv(shape.value_dim, columns)
    factors = rows.v.new_empty(count * heads * blocks, 2, CHUNK, form.rows)
    if isinstance(held, DeltaSlots):
        places = batch.read, batch.written, None
        kept = held.keys, held.updates, held.decays, held.states
    else:
        own = torch.arange(count, dtype=torch.int32, device=output.device)
        updates = rows.v.new_empty(count, heads, CHUNK, shape.value_dim)
        places, kept = (None, own, held.first), (None, updates, None, held.states)
    _rule_kernel[(count, heads, blocks)](
        rows.q, rows.k, rows.v, rows.decay, rows.beta, batch.positions, batch.counts, batch.tokens,
        *places, *kept, factors, output, heads, shape.key_heads, shape.key_dim, shape.value_dim,
        form.rows, columns, min(form.depth, _padded(shape.key_dim)),
        num_warps=form.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


class PagedDelta:
    """The delta rule of the rollout; one object serves all layers of a forward."""

    def __init__(
        self, batch: DeltaBatch, owners: torch.Tensor, parts: Sequence[DeltaBatch]
    ) -> None:
        """``parts`` are the sequences of ``batch`` by how many of their rows are computed at once;
        ``owners`` int32 [T], the sequence of each token.
        """
        self._batch, self._owners, self._parts = batch, owners, parts

    @classmethod
    def of(
        cls,
        positions: Sequence[int],
        counts: Sequence[int],
        read: Sequence[int],
        written: Sequence[int],
        device: torch.device,
    ) -> "PagedDelta":
        """A ragged batch, known to the host, whose tokens are end to end; see ``DeltaBatch``."""
        for one in zip(positions, counts, read, written, strict=True):
            _check(*one)
        new = torch.tensor(counts)
        owners = torch.repeat_interleave(torch.arange(len(counts)), new)
        columns = [torch.tensor(x) for x in (positions, counts, read, written)]
        columns.insert(2, new.cumsum(0) - new)
        sent = to_device(torch.stack(columns).int(), device)
        batch = DeltaBatch(*sent.unbind(0), int(new.max()))
        parts, fewest = list[DeltaBatch](), 0
        for form in FORMS:
            most = form.rows if form is not FORMS[-1] else batch.longest
            if bool((chosen := (new > fewest) & (new <= most)).any()):
                index = to_device(chosen.nonzero()[:, 0], device)
                parts.append(batch.sequences(index, most))
            fewest = most
        return cls(batch, to_device(owners.int(), device), parts)

    @classmethod
    def decoding(
        cls, positions: torch.Tensor, read: torch.Tensor, written: torch.Tensor
    ) -> "PagedDelta":
        """One new token for each sequence, int32 [n] on the device each; asks nothing of the host,
        so it can be captured.
        """
        places = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        batch = DeltaBatch(positions, torch.ones_like(places), places, read, written, 1)
        return cls(batch, places, [batch])

    def forward(
        self, slots: DeltaSlots, inputs: DeltaInputs, weights: DeltaWeights
    ) -> torch.Tensor:
        """-> o [T, H DV] in the dtype of x."""
        rows = rows_of(inputs, weights, self._batch, self._owners, slots)
        output = inputs.x.new_empty(len(inputs.x), weights.shape.values)
        for part in self._parts:
            apply_rule(rows, weights.shape, part, slots, output)
        return output


def _check(position: int, count: int, read: int, written: int) -> None:
    assert count > 0
    assert (read < 0) == (position == 0), "a sequence goes on from a slot, or begins"
    assert written >= 0
    same = (position + count - 1) // CHUNK == max(position - 1, 0) // CHUNK
    assert read != written or same, "a slot cannot be written with the next chunk in place"
