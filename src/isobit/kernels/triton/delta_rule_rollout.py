"""The gated delta rule of the rollout: prompts and guesses with the kernels of
``isobit.kernels.triton.delta_rule``, and sequences with one new row, as in decoding, with two of
its own, whose sums are the same chains.

``_begin_kernel`` makes S0 where a row is the first of its chunk, in the carry that is written; so
``_row_kernel`` knows that carry alone.  A warp of it has one sequence, one value head and a block
of dv; a thread has a few columns of S0 and u, and two rows of keys.  It takes every chain with
``fma`` on its own: k_d and q_d are read by all threads, and the factors of u_j come from the thread
that made them.  So nothing passes through shared memory and no thread waits for another; what a
step costs is to read S0, keys and u once.

Shapes are those of ``isobit.kernels.triton.delta_rule``.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
# pyright: reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DeltaInputs, DeltaShape, DeltaWeights, PagedBatch
from isobit.kernels.spec.delta_rule import DeltaCarries
from isobit.kernels.triton.delta_factors import FEW_ROWS
from isobit.kernels.triton.delta_rows import (
    CHUNK,
    DeltaBatch,
    DeltaRows,
    padded,
    reach_of,
    rows_of,
)
from isobit.kernels.triton.delta_rule import apply_rule, put_next_state
from isobit.kernels.triton.memory import to_device

_CHUNK = tl.constexpr(CHUNK)
_PART = tl.constexpr(16)  # rows of u that are read at once
BEGUN_ROWS = 32  # of S0, that a program of ``_begin_kernel`` makes
SEQUENCES = 16  # that it looks at


@triton.jit(do_not_specialize=["count"])
def _begin_kernel(
    COUNT, READ, WORK, STATES, KEYS, UPDATES, DECAYS, count, H: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """One program BK rows of S0 of a value head, for those of SEQUENCES sequences whose one new row
    begins a chunk: they write another carry than they read.
    """
    h = tl.program_id(1)
    d = tl.program_id(2) * BK
    first = tl.program_id(0) * SEQUENCES
    for n in range(first, tl.minimum(first + SEQUENCES, count)):
        read = tl.load(READ + n).to(tl.int64)
        work = tl.load(WORK + n).to(tl.int64)
        if (read != work) & (tl.load(COUNT + n) == 1):
            rows = tl.where(read < 0, 0, _CHUNK)  # of the chunk in front
            held = read * H + h
            keys = KEYS + held * (_CHUNK * DK)
            for start in range(0, DV, BV):
                put_next_state(
                    STATES + held * (DK * DV), read >= 0, STATES + (work * H + h) * (DK * DV),
                    keys, keys, UPDATES + held * (_CHUNK * DV), DECAYS + held * _CHUNK, rows,
                    rows, d, d + BK, start + tl.arange(0, BV), 1, DK, DV, BK, _PART,
                )  # fmt: skip


@triton.jit
def _four_columns(x):
    """x [N, 4] -> its columns."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _row_kernel(
    Q, K, V, DECAY, BETA, POSITION, COUNT, TOKEN, WORK, STATES, KEYS, UPDATES, DECAYS, OUT,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV columns of DV; it reads DEPTH numbers of each
    vector of DK at once.  A sequence whose new rows are not one has other programs.
    """
    n = tl.program_id(0)
    i = tl.load(POSITION + n) % _CHUNK
    token = tl.load(TOKEN + n).to(tl.int64)
    work = tl.load(WORK + n).to(tl.int64)
    if tl.load(COUNT + n) != 1:
        return
    h = tl.program_id(1)
    row = tl.arange(0, _CHUNK)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    is_there = (column < DV) | (DV % BV == 0)
    is_known = row < i
    of_token = token * H + h
    q = Q + (token * KH + h // (H // KH)) * DK
    k = K + (token * KH + h // (H // KH)) * DK
    held = work * H + h
    state = STATES + held * (DK * DV) + column
    keys = KEYS + held * (_CHUNK * DK)
    updates = UPDATES + held * (_CHUNK * DV) + column
    decays = DECAYS + held * _CHUNK
    told = tl.zeros([BV], tl.float32)
    output = tl.zeros([BV], tl.float32)
    between = tl.zeros([_CHUNK], tl.float32)
    read_by = tl.zeros([_CHUNK], tl.float32)
    own = 0.0  # q . k of the row itself
    for first in range(0, DK, DEPTH):
        for four in tl.static_range(0, DEPTH, 4):
            d = first + four + tl.arange(0, 4)
            inside = is_known[:, None] & ((d < DK) | (DK % DEPTH == 0))[None, :]
            of_rows = _four_columns(
                tl.load(keys + row[:, None] * DK + d[None, :], mask=inside, other=0.0)
            )
            for place in tl.static_range(4):
                d = first + four + place
                inside = (d < DK) | (DK % DEPTH == 0)
                key = tl.load(k + d, mask=inside, other=0.0)
                query = tl.load(q + d, mask=inside, other=0.0)
                s = tl.load(state + d * DV, mask=is_there & inside, other=0.0)
                between = tl.math.fma(key, of_rows[place], between)
                read_by = tl.math.fma(query, of_rows[place], read_by)
                told = tl.math.fma(key, s, told)
                output = tl.math.fma(query, s, output)
                own = tl.math.fma(query, key, own)
    total = tl.load(decays + i - 1, mask=i > 0, other=0.0) + tl.load(DECAY + of_token)
    beta = tl.load(BETA + of_token)
    decay = tl.exp(total - tl.load(decays + row, mask=is_known, other=0.0))
    taken = tl.where(is_known, -(beta * (decay * between)), 0.0)
    given = tl.where(is_known, decay * read_by, 0.0)
    seen = tl.exp(total)
    v = tl.load(V + of_token * DV + column, mask=is_there, other=0.0)
    made = beta * (v - seen * told)
    output = seen * output
    for first in range(0, i, _PART):
        for part in tl.static_range(_PART):
            j = first + part
            u = tl.load(updates + j * DV, mask=is_there & (j < i), other=0.0)
            at = tl.full([1], j, tl.int32)
            made = tl.math.fma(tl.broadcast_to(tl.gather(taken, at, 0), [BV]), u, made)
            output = tl.math.fma(tl.broadcast_to(tl.gather(given, at, 0), [BV]), u, output)
    made = made + 0.0
    output = tl.math.fma(own, made, output) + 0.0
    tl.store(updates + i * DV, made, mask=is_there)
    tl.store(OUT + of_token * DV + column, output.to(OUT.dtype.element_ty), mask=is_there)
    if tl.program_id(2) == 0:
        tl.store(decays + i, total)
        for first in range(0, DK, _CHUNK):
            d = first + row
            tl.store(keys + i * DK + d, tl.load(k + d, mask=d < DK, other=0.0), mask=d < DK)


@dataclass(frozen=True, slots=True)
class RowForm:
    """What a program of ``_row_kernel`` has, which is in no bit."""

    columns: int  # of dv
    depth: int
    registers: int  # of a thread, at most; what it reads at once waits in them


FEW, MANY = RowForm(32, 32, 168), RowForm(128, 16, 128)
FEW_PAIRS = 1 << 9  # of a sequence and a value head, below which columns are spread


def decode(
    rows: DeltaRows,
    shape: DeltaShape,
    batch: DeltaBatch,
    carries: DeltaCarries,
    output: torch.Tensor,
    form: RowForm | None = None,
) -> None:
    """Write o of sequences with one new row to its token in ``output`` [T, H DV], and what is kept
    of it to their carries.
    """
    count, heads, key_dim = len(batch.positions), shape.value_heads, shape.key_dim
    form = form or (FEW if count * heads < FEW_PAIRS else MANY)
    held = carries.states, carries.keys, carries.updates, carries.decays
    _begin_kernel[(triton.cdiv(count, SEQUENCES), heads, triton.cdiv(key_dim, BEGUN_ROWS))](
        batch.counts, batch.read, batch.written, *held, count, heads, key_dim, shape.value_dim,
        min(128, padded(shape.value_dim)), BEGUN_ROWS, SEQUENCES, num_warps=8, num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    columns = min(form.columns, padded(shape.value_dim))
    _row_kernel[(count, heads, triton.cdiv(shape.value_dim, columns))](
        rows.q, rows.k, rows.v, rows.decay, rows.beta, batch.positions, batch.counts, batch.tokens,
        batch.written, *held, output, heads, shape.key_heads, key_dim, shape.value_dim, columns,
        min(form.depth, padded(key_dim)), num_warps=1, num_stages=1, maxnreg=form.registers,
        enable_fp_fusion=False,
    )  # fmt: skip


class PagedDeltaRule:
    """The delta rule of the rollout; one object serves all layers of a forward."""

    def __init__(
        self, batch: DeltaBatch, owners: torch.Tensor, parts: Sequence[DeltaBatch]
    ) -> None:
        """``parts`` are the sequences of ``batch`` by how many of their rows are computed at once;
        a part for one row may have others, which it skips.  ``owners`` int32 [T], the sequence of
        each token.
        """
        self._batch, self._owners, self._parts = batch, owners, parts

    @classmethod
    def of(cls, paged: PagedBatch, device: torch.device) -> "PagedDeltaRule":
        """A ragged batch, known to the host."""
        assert paged.carries is not None, "sequences of a model with delta rules have carries"
        new = torch.tensor(paged.counts)
        positions, (read, written) = torch.tensor(paged.lengths) - new, paged.carries
        columns = positions, new, read, written
        for one in zip(*(column.tolist() for column in columns), strict=True):
            _check(*one)
        owners = torch.repeat_interleave(torch.arange(len(new)), new)
        starts = new.cumsum(0) - new
        sent = to_device(torch.stack([positions, new, starts, read, written]).int(), device)
        batch = DeltaBatch(*sent.unbind(0), int(new.max()))
        last = (torch.tensor(paged.lengths) - 1) // CHUNK
        begin = torch.where(read == written, last, (positions - 1).clamp(min=0) // CHUNK)
        chunks = last - begin + 1
        order = torch.argsort(chunks, descending=True, stable=True)
        parts, fewest = list[DeltaBatch](), 0
        for most in (1, FEW_ROWS, batch.longest):
            if len(chosen := order[(new[order] > fewest) & (new[order] <= most)]):
                reach = reach_of(chunks[chosen])
                parts.append(batch.sequences(to_device(chosen, device), most, reach))
            fewest = most
        return cls(batch, to_device(owners.int(), device), parts)

    @classmethod
    def decoding(
        cls,
        positions: torch.Tensor,
        read: torch.Tensor,
        written: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> "PagedDeltaRule":
        """One new token for each sequence, or several as ``places`` says (``DecodeBatch``), [n] on
        the device each; asks nothing of the host, so it can be captured.
        """
        index = torch.arange(len(positions), device=positions.device)
        counts, owners = torch.ones_like(index), index
        if places is not None:  # a row that is not the first of its sequence is one of no tokens
            owners = index - places
            counts = torch.zeros_like(index).index_add_(0, owners, counts)
        columns = positions, counts, index, read, written
        batch = DeltaBatch(*(column.int() for column in columns), 1)
        parts = [batch]
        if places is not None:
            order, rows = batch.counts.argsort(descending=True), len(index)
            for fewest, most in ((1, min(rows, FEW_ROWS)), (FEW_ROWS, rows)):
                if reach := _reach(rows, fewest, most):
                    part = batch.sequences(order[: reach[0]], most, reach)
                    is_its = (part.counts > fewest) & (part.counts <= most)
                    parts.append(replace(part, counts=torch.where(is_its, part.counts, 0)))
        return cls(batch, owners.int(), parts)

    def forward(
        self, carries: DeltaCarries, inputs: DeltaInputs, weights: DeltaWeights
    ) -> torch.Tensor:
        """-> o [T, H DV] in the dtype of x."""
        rows = rows_of(inputs, weights, self._batch, self._owners, carries)
        output = inputs.x.new_empty(len(inputs.x), weights.shape.values)
        for part in self._parts:
            apply = decode if part.longest == 1 else apply_rule
            apply(rows, weights.shape, part, carries, output)
        return output


def _reach(rows: int, fewest: int, most: int) -> tuple[int, ...]:
    """A bound for ``DeltaBatch.chunks`` of sequences that have more than ``fewest`` rows each, and
    ``most`` at most, of so many in all: chunk c of a sequence is behind 64 (c - 1) of its rows.
    """
    needed = (max(fewest, CHUNK * (c - 1)) + 1 for c in range(most // CHUNK + 2))
    return tuple(rows // number for number in needed if number <= most)


def _check(position: int, count: int, read: int, written: int) -> None:
    assert count > 0
    assert (read < 0) == (position == 0), "a sequence goes on from a carry, or begins"
    assert written >= 0
    last = (position + count - 1) // CHUNK
    if read == written:
        assert position // CHUNK == last, "a carry that is read and written is of one chunk"
    elif read >= 0:
        assert (position - 1) // CHUNK < last, "another carry is written for a further chunk"
