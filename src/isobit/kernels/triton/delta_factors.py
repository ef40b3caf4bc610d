"""What the chains of the gated delta rule need of a chunk without its state: G, and the factors of
each u_j in u_i and o_i,

    -beta_i (exp(G_i - G_j) (k_i . k_j)), j < i        exp(G_i - G_j) (q_i . k_j), j <= i

for the walk over chunks of ``isobit.kernels.triton.delta_rule``, which says how each sum goes.  One
program makes those of a chunk and a key head, k . k and q . k once for all its value heads, so
chunks of a sequence are made at once.  It also writes keys and G of new rows to their carry.

**Pieces.**  So that factors do not grow with the tokens, chunks go in pieces: so many consecutive
ones of the sequences that reach them that their factors are FACTORS numbers, or one chunk of one
sequence.  The walk goes on from the states that the piece before has left.

Shapes: n sequences, H value heads, H / r key heads (KH), heads of DK; FP32.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DeltaShape
from isobit.kernels.spec.delta_rule import DeltaCarries
from isobit.kernels.triton.delta_rows import CHUNK, DeltaBatch, DeltaRows, carried_chunk, padded

_CHUNK = tl.constexpr(CHUNK)
FEW_ROWS = 16  # new rows of a sequence that has guesses, at most


@triton.jit
def chunks_of(n, POSITION, COUNT, READ, WORK):
    """The position of a sequence's first new row and the one behind its last, its first chunk and
    its last, and the carries that it reads (-1 for none) and writes.
    """
    position = tl.load(POSITION + n)
    count = tl.load(COUNT + n)
    work = tl.load(WORK + n).to(tl.int64)
    read = tl.full([], -1, tl.int64)
    if READ is not None:
        read = tl.load(READ + n).to(tl.int64)
    stop = position + count
    begin = carried_chunk(position, stop, read == work)
    last = tl.where(count > 0, (stop - 1) // _CHUNK, begin - 1)
    return position, stop, begin, last, read, work


@triton.jit
def keys_of(new, held, old, row, end, d, KH: tl.constexpr, DK: tl.constexpr):
    """FP32 [row, d]: rows of the chunk below ``old`` from the carry, whose head's keys begin at
    ``held``, those below ``end`` from the new tokens: at ``new`` is that of row 0, if it is one.
    """
    rows = new + row * (KH * DK)
    if held is not None:
        rows = tl.where(row < old, held + row * DK, rows)
    inside = (row < end)[:, None] & (d < DK)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["place"])
def _factors_kernel(
    Q, K, DECAY, BETA, POSITION, COUNT, TOKEN, READ, WORK, KEYS, DECAYS, FACTORS, TOTALS, place,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program a sequence, one of its chunks from number ``place`` on, and key head; of the
    chunk, ROWS new rows at most.  HEADS is the next power of two of H / r.

    To FACTORS [n, chunks, H, 2, 64, ROWS], of u and then of o, and TOTALS [n, chunks, H, 64], G.
    """
    n = tl.program_id(0).to(tl.int64)
    kh = tl.program_id(2)
    of_head: tl.constexpr = H // KH
    position, stop, begin, last, read, work = chunks_of(n, POSITION, COUNT, READ, WORK)
    chunk = begin + place + tl.program_id(1)
    if chunk > last:
        return
    slot = (n * tl.num_programs(1) + tl.program_id(1)) * H
    token = tl.load(TOKEN + n).to(tl.int64) + (chunk * _CHUNK - position)  # of row 0, if it is new
    q = Q + (token * KH + kh) * DK
    k = K + (token * KH + kh) * DK
    is_first = chunk == begin
    old = tl.where(is_first, position - begin * _CHUNK, 0)  # rows that the carry read holds
    end = tl.minimum(stop - chunk * _CHUNK, _CHUNK)
    row = tl.arange(0, _CHUNK)
    group_row = tl.arange(0, ROWS)
    m = old + group_row
    is_new = (row >= old) & (row < end)
    kept = tl.where(is_first & (read >= 0), read, work)  # the carry of the new rows
    is_kept = (chunk == last) | (kept != work)
    held = None
    if KEYS is not None:
        held = KEYS + (read * H + kh * of_head) * (_CHUNK * DK)
    between = tl.zeros([ROWS, _CHUNK], tl.float32)
    read_by = tl.zeros([ROWS, _CHUNK], tl.float32)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)
        keys = keys_of(k, held, old, row, end, d, KH, DK)
        at = m[:, None] * (KH * DK) + d[None, :]
        inside = (m < end)[:, None] & (d < DK)[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        query = tl.load(q + at, mask=inside, other=0.0)
        if KEYS is not None:
            at = row[:, None] * DK + d[None, :]
            put = is_new[:, None] & (d < DK)[None, :] & is_kept
            for h in tl.static_range(of_head):
                to = KEYS + (kept * H + kh * of_head + h) * (_CHUNK * DK)
                tl.store(to + at, keys, mask=put)
        keys = tl.trans(keys)
        between = tl.dot(key, keys, between, input_precision="ieee")
        read_by = tl.dot(query, keys, read_by, input_precision="ieee")
    heads = tl.arange(0, HEADS)
    total = tl.zeros([HEADS], tl.float32)
    for i in tl.static_range(_CHUNK):  # all are read at once, and added one by one
        h = kh * of_head + heads
        is_its = (heads < of_head) & (i >= old) & (i < end)
        one = tl.load(DECAY + (token + i) * H + h, mask=is_its, other=0.0)
        if DECAYS is None:
            total += one
        else:
            of_row = DECAYS + h * _CHUNK + i
            was = (heads < of_head) & (i < old)
            before = tl.load(of_row + read * H * _CHUNK, mask=was, other=0.0)
            total = tl.where(i < old, before, total + one)
            tl.store(of_row + kept * H * _CHUNK, total, mask=is_its & is_kept)
        tl.store(TOTALS + (slot + h) * _CHUNK + i, total, mask=heads < of_head)
    tl.debug_barrier()
    for h in range(kh * of_head, (kh + 1) * of_head):
        decays = tl.load(TOTALS + (slot + h) * _CHUNK + row)
        totals = tl.load(TOTALS + (slot + h) * _CHUNK + m, mask=m < end, other=0.0)
        beta = tl.load(BETA + (token + m) * H + h, mask=m < end, other=0.0)
        distance = totals[:, None] - decays[None, :]
        decay = tl.exp(tl.where(distance > 0.0, 0.0, distance))  # only of later rows above 0
        taken = -(beta[:, None] * (decay * between))
        taken = tl.where(row[None, :] < m[:, None], taken, 0.0)
        given = tl.where(row[None, :] <= m[:, None], decay * read_by, 0.0)
        to = FACTORS + (slot + h) * (2 * _CHUNK * ROWS)
        to += row[None, :] * ROWS + group_row[:, None]
        tl.store(to, taken)
        tl.store(to + _CHUNK * ROWS, given)


@dataclass(frozen=True, slots=True)
class FactorsForm:
    """What a program of ``_factors_kernel`` computes at once, which is in no bit."""

    depth: int  # numbers of a key that a product reads
    warps: int


FORMS = {FEW_ROWS: FactorsForm(32, 4), CHUNK: FactorsForm(32, 8)}
"""Its forms by the most new rows of a chunk."""


def pieces(chunks: tuple[int, ...], most: int) -> Iterator[tuple[int, int, int, int]]:
    """The first sequence of a piece, that behind its last, its first chunk and how many there are,
    of at most ``most`` chunks in all; ``chunks`` as ``DeltaBatch`` has them.
    """
    place = 0
    while place < len(chunks):
        reach = chunks[place]
        count = min(max(1, most // reach), len(chunks) - place)
        for first in range(0, reach, most):
            yield first, min(first + most, reach), place, count
        place += count


def put_factors(
    rows: DeltaRows,
    shape: DeltaShape,
    batch: DeltaBatch,
    places: tuple[torch.Tensor | None, torch.Tensor],
    carries: DeltaCarries | None,
    piece: tuple[int, int],
    to: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write factors [chunks, H, 2, 64, rows] and G [chunks, H, 64] of all sequences of ``batch``;
    ``piece`` is the first chunk and how many there are, ``places`` the carries read and written.
    """
    rows_of_chunk = to[0].shape[-1]
    form = FORMS[rows_of_chunk]
    held = (None, None) if carries is None else (carries.keys, carries.decays)
    place, count = piece
    _factors_kernel[(len(batch.positions), count, shape.key_heads)](
        rows.q, rows.k, rows.decay, rows.beta, batch.positions, batch.counts, batch.tokens,
        *places, *held, *to, place, shape.value_heads, shape.key_heads, shape.key_dim,
        triton.next_power_of_2(shape.value_heads // shape.key_heads), rows_of_chunk,
        min(form.depth, padded(shape.key_dim)), num_warps=form.warps, num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip
