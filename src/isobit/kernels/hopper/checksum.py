"""The checksum of bytes (``isobit.kernels.noise``): one launch for any number of tensors, each byte
read once and one number written a program.

A u_i takes some twenty instructions, too many for every word.  They are the same in every chunk, so
a program takes the same places of up to _RUN chunks and computes each u_i once:

    sum_i u_i (sum_c v_c word_(c C + i))

A chunk's places are columns of _WIDTH.  A tensor's programs are the columns that it touches times
its runs of _RUN chunks; tables on the device say which tensor a program has.  Integer sums modulo
2^64 have no order, so the division into programs changes nothing.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.memory import to_device
from isobit.kernels.hopper.sampling import splitmix64
from isobit.kernels.noise import CHUNK, SEED, WORD, Rows

_WIDTH = 2048
_RUN = 16
_WARPS = 8
_SEED = tl.constexpr(SEED)
_WORD = tl.constexpr(WORD)
_FIELDS = tl.constexpr(7)


@triton.jit
def _outer(seed, chunk):
    """v_c, uint64."""
    return splitmix64(seed.to(tl.uint64), chunk.to(tl.uint64)) | 1


@triton.jit
def _from_bytes(origin, start, begin, end, WIDTH: tl.constexpr):
    """int32 [WIDTH] from byte ``start`` of a tensor; zeros for bytes outside it."""
    address = origin.to(tl.pointer_type(tl.uint8))
    words = tl.zeros([WIDTH], tl.int32)
    for place in range(_WORD):
        byte = start + tl.arange(0, WIDTH) * _WORD + place
        one = tl.load(address + byte, mask=(byte >= begin) & (byte < end), other=0)
        words |= one.to(tl.int32) << (8 * place)
    return words


@triton.jit
def _sums_kernel(TABLE, OWNER, SUMS, CHUNK: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """One program WIDTH places of RUN chunks of a tensor, whose row of the table is ``_row``'s.

    Whole aligned columns are read as vectors of words; the ends of a tensor byte by byte.
    """
    program = tl.program_id(0)
    row = TABLE + tl.load(OWNER + program) * _FIELDS
    origin, begin, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    seed, columns, before = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)

    chunk_bytes: tl.constexpr = CHUNK * _WORD
    column_bytes: tl.constexpr = WIDTH * _WORD
    index = program - before
    column = (begin // column_bytes + index % columns) % (CHUNK // WIDTH)
    top = column * column_bytes
    first = begin // chunk_bytes + index // columns * RUN
    last = tl.minimum(first + RUN, tl.cdiv(end, chunk_bytes))
    # chunks that have the whole column; no dividend is negative, whose quotient would round up
    whole = tl.maximum(first, (begin - top + chunk_bytes - 1) // chunk_bytes)
    behind = tl.minimum(last, (end - top + chunk_bytes - column_bytes) // chunk_bytes)
    behind = tl.where(origin % 16 == 0, behind, whole)

    acc = tl.zeros([WIDTH], tl.uint64)
    for step in range(behind - whole):
        chunk = whole + step
        address = (origin + chunk * chunk_bytes + top).to(tl.pointer_type(tl.int32))
        words = tl.load(tl.multiple_of(address, 16) + tl.arange(0, WIDTH))
        acc += words.to(tl.uint64) * _outer(seed, chunk)
    for step in range(last - first):
        chunk = first + step
        if (chunk < whole) | (chunk >= behind):
            words = _from_bytes(origin, chunk * chunk_bytes + top, begin, end, WIDTH)
            acc += words.to(tl.uint64) * _outer(seed, chunk)
    place = (column * WIDTH + tl.arange(0, WIDTH)).to(tl.uint64)
    tl.store(SUMS + program, tl.sum(acc * (splitmix64(_SEED, place) | 1), 0).to(tl.int64))


def checksum(rows: Sequence[Rows]) -> int:
    """The checksum; rows are read byte by byte where their address and place differ modulo 16."""
    tensors = [one.tensor.contiguous() for one in rows]
    table, programs = list[tuple[int, ...]](), 0
    for one, tensor in zip(rows, tensors, strict=True):
        table.append(_row(tensor, one.first_word * WORD, one.seed, programs))
        programs += table[-1][-1]
    device = tensors[0].device
    there = to_device(torch.tensor(table), device)
    owner = torch.repeat_interleave(there[:, -1], output_size=programs)
    sums = torch.empty(programs, dtype=torch.int64, device=device)
    _sums_kernel[(programs,)](there, owner, sums, CHUNK, _WIDTH, _RUN, num_warps=_WARPS)
    return int(sums.sum()) % (1 << 64)


def _row(tensor: torch.Tensor, begin: int, seed: int, before: int) -> tuple[int, ...]:
    """The address of byte 0 of the whole tensor; the range of bytes; the seed; its columns, the
    number of programs of earlier tensors, and its own.
    """
    end = begin + tensor.nbytes
    columns = min(_touched(begin, end, _WIDTH), CHUNK // _WIDTH)
    programs = columns * -(-_touched(begin, end, CHUNK) // _RUN)
    return tensor.data_ptr() - begin, begin, end, seed, columns, before, programs


def _touched(begin: int, end: int, words: int) -> int:
    """Blocks of ``words`` words that contain some of the bytes."""
    size = words * WORD
    return -(-end // size) - begin // size
