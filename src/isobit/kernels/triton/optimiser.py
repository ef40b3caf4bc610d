"""AdamW, sums of squares of gradients, ordered sums of gradients, and checksums of bytes.

**AdamW** takes one pass over master, gradient and moments, with the bits of
``isobit.kernels.spec.optimiser``.  An element costs 28 bytes with FP32 moments, 20 with BF16 ones
and 16 with 8-bit ones.  Division and square root are the rounded ones, no product is fused with a
sum, and the noise is a function of the element's number in the whole tensor: nothing depends on the
launch.  8-bit moments are tiles of [groups, 128] elements with scales [groups, 1]; shifts and a
product with a power of two convert their codes.

**Sums of squares** of every 128 rows, in FP64.  A program sums a piece of 16384 elements, 2048 at a
time, one sum a lane, then its lanes; a second kernel adds a block's pieces, ascending.  So a slice
of a tensor at a multiple of 128 rows has the sums that it has in the whole.  The square of an FP32
number is exact in FP64 and cannot overflow: a sum is finite if and only if every element is.

**Checksums** (``isobit.kernels.noise``): one launch for any number of tensors, each byte read once
and one number written a program.  A u_i takes some twenty instructions, too many for every word.
They are the same in every chunk, so a program takes the same places of up to _CHECKED_RUN chunks
and computes each u_i once:

    sum_i u_i (sum_c v_c word_(c C + i))

A chunk's places are columns of _CHECKED_WIDTH.  A tensor's programs are the columns that it touches
times its runs of chunks; tables on the device say which tensor a program has.  Integer sums modulo
2^64 have no order, so the division into programs changes nothing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from isobit.kernels.noise import CHUNK, GROUP, SEED, WORD, AdamWFactors, Rows, check_moments
from isobit.kernels.spec import optimiser
from isobit.kernels.spec.optimiser import BF16_NAN
from isobit.kernels.triton.memory import to_device
from isobit.kernels.triton.sampling import splitmix64
from isobit.precision.quant_tensor import BLOCK, num_blocks

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)


_ABOVE_448, _ABOVE_496 = tl.constexpr(optimiser.ABOVE_448), tl.constexpr(optimiser.ABOVE_496)
_NOT_FINITE = tl.constexpr(optimiser.NOT_FINITE)
_REBIAS, _UNBIAS = tl.constexpr(optimiser.REBIAS), tl.constexpr(1 / optimiser.REBIAS)
_MAGNITUDE, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)


@triton.jit
def _value(codes, MANTISSA: tl.constexpr):
    """The FP32 number of an int32 code, a sign and eight bits of exponent."""
    return (codes << (23 - MANTISSA)).to(tl.float32, bitcast=True) * _REBIAS


@triton.jit
def _of_byte(scales):
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_first(codes, scales):
    """Bytes -> m."""
    bits = codes.to(tl.int32)
    return _value((bits & 0x7F) | ((bits & 0x80) << 4), 3) * _of_byte(scales)


@triton.jit
def decode_second(codes, scales):
    """Bytes -> v."""
    root = _value(codes.to(tl.int32), 4) * _of_byte(scales)
    return root * root


@triton.jit
def _scales(x, ABOVE: tl.constexpr):
    """-> the bytes of the scales, their FP32 reciprocals, and which groups are not finite."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 1, keep_dims=True)
    bad = largest >= _INFINITY
    exponent = tl.maximum(((largest + ABOVE) >> 23) - 8, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(bad, _NOT_FINITE, exponent).to(tl.uint8), inverse, bad


@triton.jit
def encode_first(m, noise):
    """FP32 m and int32 noise in 0 .. 65535 -> codes and scales."""
    scales, inverse, bad = _scales(m, _ABOVE_448)
    bits = (tl.abs(m * inverse) * _UNBIAS).to(tl.int32, bitcast=True)
    codes = (bits + (noise << 4) + 8) >> 20
    codes |= (m.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(bad, 0, codes).to(tl.uint8), scales


@triton.jit
def encode_second(root, noise):
    """FP32 sqrt(v) and int32 noise in 0 .. 65535 -> codes and scales."""
    scales, inverse, bad = _scales(root, _ABOVE_496)
    scaled = root * inverse
    codes = (scaled * _UNBIAS).to(tl.int32, bitcast=True) >> 19
    low, high = _value(codes, 4), _value(codes + 1, 4)
    drawn = (noise.to(tl.float32) + 0.5) * ((high - low) * (high + low))
    codes += (drawn < (scaled - low) * (scaled + low) * 65536.0).to(tl.int32)
    codes = tl.maximum(codes, (root > 0).to(tl.int32))
    return tl.where(bad, 0, codes).to(tl.uint8), scales


_WIDTH = 1024
_NAN = tl.constexpr(BF16_NAN)


@triton.jit
def _round_stochastically(x, noise):
    """FP32 -> BF16, up or down by uint32 noise in 0 .. 65535."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(x == x, bits, _NAN).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update(w, g, m, v, clip, beta1, rest1, beta2, rest2, root, epsilon, size, decay):
    """-> the new master, m, v and sqrt(v), all FP32."""
    g = g * clip
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    v_root = tl.sqrt_rn(v)
    quotient = tl.div_rn(m, v_root * root + epsilon)
    return w - (w * decay + quotient * size), m, v, v_root


@triton.jit(do_not_specialize=["key", "first"])
def _adamw_kernel(
    MASTER, GRAD, FIRST, SECOND, n, key, first, clip, beta1, rest1, beta2, rest2, root, epsilon,
    size, decay,
    WIDTH: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """FP32 moments, or BF16 with NOISE; one program WIDTH of n elements from ``first`` on."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < n
    w = tl.load(MASTER + element, mask=inside, other=0.0)
    g = tl.load(GRAD + element, mask=inside, other=0.0)
    m = tl.load(FIRST + element, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(SECOND + element, mask=inside, other=0.0).to(tl.float32)
    w, m, v, _ = _update(w, g, m, v, clip, beta1, rest1, beta2, rest2, root, epsilon, size, decay)
    tl.store(MASTER + element, w, mask=inside)
    if NOISE:
        bits = splitmix64(key.to(tl.uint64), (element + first).to(tl.uint64)).to(tl.uint32)
        m = _round_stochastically(m, bits & 0xFFFF)
        v = _round_stochastically(v, bits >> 16)
    tl.store(FIRST + element, m, mask=inside)
    tl.store(SECOND + element, v, mask=inside)


@triton.jit(do_not_specialize=["key", "first"])
def _adamw_8_bits_kernel(
    MASTER, GRAD, FIRST, SECOND, FIRST_SCALES, SECOND_SCALES, n, key, first,
    clip, beta1, rest1, beta2, rest2, root, epsilon, size, decay,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """8-bit moments; one program GROUPS groups of 128 of n elements from ``first`` on."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    element = group * 128 + tl.arange(0, 128)[None, :]
    inside, begun = element < n, group * 128 < n
    w = tl.load(MASTER + element, mask=inside, other=0.0)
    g = tl.load(GRAD + element, mask=inside, other=0.0)
    m_scales = tl.load(FIRST_SCALES + group, mask=begun, other=0)
    v_scales = tl.load(SECOND_SCALES + group, mask=begun, other=0)
    m = decode_first(tl.load(FIRST + element, mask=inside, other=0), m_scales)
    v = decode_second(tl.load(SECOND + element, mask=inside, other=0), v_scales)
    w, m, _, v_root = _update(
        w, g, m, v, clip, beta1, rest1, beta2, rest2, root, epsilon, size, decay
    )
    tl.store(MASTER + element, w, mask=inside)
    bits = splitmix64(key.to(tl.uint64), (element + first).to(tl.uint64)).to(tl.uint32)
    codes, scales = encode_first(m, (bits & 0xFFFF).to(tl.int32))
    tl.store(FIRST + element, codes, mask=inside)
    tl.store(FIRST_SCALES + group, scales, mask=begun)
    codes, scales = encode_second(v_root, (bits >> 16).to(tl.int32))
    tl.store(SECOND + element, codes, mask=inside)
    tl.store(SECOND_SCALES + group, scales, mask=begun)


def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    factors: AdamWFactors,
    key: int | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    first_element: int = 0,
) -> None:
    """``isobit.kernels.spec.optimiser.adamw_step``; ``key`` is None for FP32 moments."""
    check_moments(master, grad, exp_avg, exp_avg_sq, key, scales, first_element)
    n, f = master.numel(), factors
    numbers = (f.clip, f.beta1, f.rest1, f.beta2, f.rest2, f.root, f.epsilon, f.size, f.decay)
    grid, options = (triton.cdiv(n, _WIDTH),), {"num_warps": 4, "enable_fp_fusion": False}
    if scales is None:
        number = 0 if key is None else key
        _adamw_kernel[grid](
            master, grad, exp_avg, exp_avg_sq, n, number, first_element, *numbers, _WIDTH,
            key is not None, **options,
        )  # fmt: skip
        return
    codes = exp_avg.view(torch.uint8), exp_avg_sq
    _adamw_8_bits_kernel[grid](
        master, grad, *codes, *scales, n, key, first_element, *numbers, _WIDTH // GROUP, **options
    )


_PIECE = 16384
_SQUARES_WIDTH = 2048
_BLOCKS = 128  # of a program that adds pieces


@triton.jit(do_not_specialize=["stride"])
def _squares_kernel(X, SUMS, stride, SIZE: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr):
    """One program a piece of a block of SIZE elements: its sum to SUMS[piece, block].

    SIZE is a constant: whether the end of a block is aligned decides the layout, and so the order
    of the lanes.
    """
    pieces: tl.constexpr = (SIZE + PIECE - 1) // PIECE
    block, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    start = X + block.to(tl.int64) * SIZE
    acc = tl.zeros([WIDTH], tl.float64)
    for first in tl.static_range(0, PIECE, WIDTH):
        element = piece * PIECE + first + tl.arange(0, WIDTH)
        if SIZE % PIECE == 0:
            x = tl.load(start + element)
        else:
            x = tl.load(start + element, mask=element < SIZE, other=0.0)
        wide = x.to(tl.float64)
        acc += wide * wide
    tl.store(SUMS + piece.to(tl.int64) * stride + block, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["blocks", "pieces"])
def _add_squares_kernel(SUMS, OUT, blocks, pieces, BLOCKS: tl.constexpr):
    """One program BLOCKS blocks: their pieces, ascending; a missing piece is zero."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    at = SUMS + block
    acc = tl.zeros([BLOCKS], tl.float64)
    for _ in range(pieces):
        acc += tl.load(at, mask=inside, other=0.0)
        at += blocks
    tl.store(OUT + block, acc, mask=inside)


def gradient_squares(grads: Sequence[torch.Tensor]) -> list[float]:
    """The sums of all blocks of 128 rows, tensor by tensor, NaN or infinite where an element is.
    FP32 tensors, contiguous, of any shapes; one without rows has none.  The host waits.
    """
    grads = [grad for grad in grads if grad.numel()]
    total = sum(num_blocks(len(grad)) for grad in grads)
    if not total:
        return []
    pieces = max(triton.cdiv(BLOCK * grad[0].numel(), _PIECE) for grad in grads)
    sums = torch.zeros((pieces, total), dtype=torch.float64, device=grads[0].device)
    first = 0
    for grad in grads:
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        assert grad.data_ptr() % 16 == 0  # another alignment would give the kernel another layout
        rows, width = len(grad), grad[0].numel()
        whole = rows // BLOCK
        _launch(grad, sums[:, first:], whole, BLOCK * width)
        _launch(grad[whole * BLOCK :], sums[:, first + whole :], 1, rows % BLOCK * width)
        first += num_blocks(rows)
    out = torch.empty(total, dtype=torch.float64, device=sums.device)
    _add_squares_kernel[(triton.cdiv(total, _BLOCKS),)](
        sums, out, total, pieces, _BLOCKS, num_warps=4
    )
    return out.tolist()


def _launch(x: torch.Tensor, sums: torch.Tensor, blocks: int, size: int) -> None:
    """The pieces of ``blocks`` blocks of ``size`` elements."""
    if not blocks * size:
        return
    piece = min(_PIECE, triton.next_power_of_2(size))
    _squares_kernel[(blocks * triton.cdiv(size, piece),)](
        x, sums, sums.stride(0), size, piece, min(_SQUARES_WIDTH, piece), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


_SUM_WIDTH = 4096
_ADDENDS = 8  # of one launch


@triton.jit
def _add_kernel(TOTAL, A0, A1, A2, A3, A4, A5, A6, A7, n, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """One program WIDTH elements, of the first COUNT addends."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < n
    total = tl.load(TOTAL + element, mask=inside) + tl.load(A0 + element, mask=inside)
    if COUNT > 1:
        total += tl.load(A1 + element, mask=inside)
    if COUNT > 2:
        total += tl.load(A2 + element, mask=inside)
    if COUNT > 3:
        total += tl.load(A3 + element, mask=inside)
    if COUNT > 4:
        total += tl.load(A4 + element, mask=inside)
    if COUNT > 5:
        total += tl.load(A5 + element, mask=inside)
    if COUNT > 6:
        total += tl.load(A6 + element, mask=inside)
    if COUNT > 7:
        total += tl.load(A7 + element, mask=inside)
    tl.store(TOTAL + element, total, mask=inside)


def add_in_order(total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
    """((total + a0) + a1) + .., in place, with each addend read once."""
    n = total.numel()
    for tensor in (total, *addends):
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert tensor.numel() == n
    if not n:
        return
    for first in range(0, len(addends), _ADDENDS):
        some = list(addends[first : first + _ADDENDS])
        unread = [total] * (_ADDENDS - len(some))
        grid = (triton.cdiv(n, _SUM_WIDTH),)
        _add_kernel[grid](total, *some, *unread, n, len(some), _SUM_WIDTH, num_warps=8)


_CHECKED_WIDTH = 2048
_CHECKED_RUN = 16
_CHECKED_WARPS = 8
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
        table.append(_row(tensor, one.first_byte, one.seed, programs))
        programs += table[-1][-1]
    device = tensors[0].device
    there = to_device(torch.tensor(table), device)
    owner = torch.repeat_interleave(there[:, -1], output_size=programs)
    sums = torch.empty(programs, dtype=torch.int64, device=device)
    _sums_kernel[(programs,)](
        there, owner, sums, CHUNK, _CHECKED_WIDTH, _CHECKED_RUN, num_warps=_CHECKED_WARPS
    )
    return int(sums.sum()) % (1 << 64)


def _row(tensor: torch.Tensor, begin: int, seed: int, before: int) -> tuple[int, ...]:
    """The address of byte 0 of the whole tensor; the range of bytes; the seed; its columns, the
    number of programs of earlier tensors, and its own.
    """
    end = begin + tensor.nbytes
    columns = min(_touched(begin, end, _CHECKED_WIDTH), CHUNK // _CHECKED_WIDTH)
    programs = columns * -(-_touched(begin, end, CHUNK) // _CHECKED_RUN)
    return tensor.data_ptr() - begin, begin, end, seed, columns, before, programs


def _touched(begin: int, end: int, words: int) -> int:
    """Blocks of ``words`` words that contain some of the bytes."""
    size = words * WORD
    return -(-end // size) - begin // size
