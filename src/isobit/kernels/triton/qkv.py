"""Between the qkv GEMM and attention, in one kernel: bias, the norms of Q and K, rotary positions,
and the flow's format.

    x = BF16(qkv + bias)                           Q, K and V, if there is a bias; added in FP32
    x = BF16(x / sqrt(mean(x^2) + eps) w)          Q and K, in models that have these norms
    x = BF16(x1 cos - x2 sin | x2 cos + x1 sin)    Q and K, products and sums in FP32
    x = H x                                        Q and K, before 8 bits, in FP32; Q's divided by
                                                   the size of H
    e4m3: byte  = that of max(amax, 2^-60) / 448 rounded up to a power of two, or a given one
          value = E4M3(clamp(x 2^(127 - byte), -448, 448))
    int8: scale = max(amax, 2^-60) / 127           FP32
          value = INT8(x (127 / max(amax, 2^-60)))
    bf16: value = x

A vector is two parts of HALF numbers, a power of two: where D is one, the halves that the rotation
pairs.  A vector of 96 has parts of 64, with zeros behind it, and the numbers that the rotation
pairs with those of a part are loaded, too.

The bytes are those of ``isobit.kernels.spec.qkv``, except where the sum of squares rounds
differently: here it adds two numbers at a time along one fixed tree.  Neither the block size nor
the layout can change a vector's bits (the tree, `max`, no contraction to fma), so decode, prefill
and training agree.  A vector that is not finite has the scale byte 255 and the value bytes 0x7F in
e4m3, the scale NaN and zeros in int8.

With scales a tensor (``isobit.precision.kv_scales``) bytes are given, and maxima are raised by
atomic maxima of FP32 bits, whose result does not depend on their order.

Below sm_89 Triton has no E4M3: its bytes are made and read by integer operations, ``as_bytes``.

K and V go to pages (rollout) or are packed (training), in the layouts of
``isobit.kernels.triton.attention``.  A page holds V of 8 bits as [D, token], so four consecutive
slots are written as a word; a single token's V is D bytes, each in its own sector, and these writes
are most of the time in decode.  ``gather_pages`` lays the pages of a batch end to end for prefill.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import QkvTransform
from isobit.kernels.triton.attention import SCALES, PackedKeys, PagedKeys
from isobit.kernels.triton.attention_tile import _within
from isobit.kernels.triton.device_functions import hadamard, rotated
from isobit.kernels.triton.e4m3 import decoded, rounded
from isobit.kernels.triton.heads import HEAD_SIZES, PAGE_TOKENS
from isobit.kernels.triton.quantise import (
    _INF_BITS,
    _ROUND_UP_ABOVE_1_75,
    FLOOR_BITS,
    to_int8,
)
from isobit.precision.quant_tensor import DTYPES, E4M3, Format
from isobit.util.errors import ConfigError

_NAMES = {dtype: format for format, dtype in DTYPES.items()}
_GATHERED = 64  # tokens of one gathering program


class Tiling(NamedTuple):
    """Tokens and heads of a program, and its warps, for up to ``most`` tokens."""

    most: float
    tokens: int
    heads: int
    warps: int


TILINGS = (Tiling(1024, 4, 1, 1), Tiling(math.inf, 32, 8, 8))


@dataclass(frozen=True, slots=True)
class Queries:
    """values [T, H, D], E4M3, INT8 or BF16; FP32 scales [T, H], except in BF16."""

    values: torch.Tensor
    scales: torch.Tensor | None


@triton.jit
def _rounded(x):
    """FP32 -> BF16 numbers in FP32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _row(X, column, there):
    """The given columns of a row of weights, as FP32 [1, columns].  ``there`` says which exist, and
    the others are zeros; None: all do.
    """
    if there is None:
        return tl.load(X + column).to(tl.float32)[None, :]
    else:
        return tl.load(X + column, mask=there, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load(QKV, BIAS, t, inside, column, there, WIDTH: tl.constexpr):
    """The given columns of tokens t, as FP32 [tokens, columns]; rows of WIDTH numbers."""
    mask = inside[:, None]
    if there is not None:
        mask = mask & there[None, :]
    x = tl.load(QKV + t[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS is not None:
        x = _rounded(x + _row(BIAS, column, there))
    return x


@triton.jit
def _sum_of_squares(x1, x2, N: tl.constexpr, HALF: tl.constexpr):
    """Two halves [N, HALF] -> [N], neighbours first, which one thread holds."""
    x = x1 * x1 + x2 * x2
    for level in tl.static_range(7 if HALF == 128 else 6 if HALF == 64 else 5):
        x = tl.sum(tl.reshape(x, [N, HALF >> (level + 1), 2]), 2)
    return tl.reshape(x, [N])


@triton.jit
def _inverse_root(x1, x2, epsilon, N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of vectors in two parts, [N, 1]."""
    total = _sum_of_squares(x1, x2, N, HALF)
    # By a power of two a division is exact.
    mean = total / D if D == 2 * HALF else tl.div_rn(total, tl.full([N], D, tl.float32))
    root = tl.sqrt_rn(mean + epsilon)
    return tl.div_rn(tl.full([N], 1.0, tl.float32), root)[:, None]


@triton.jit
def _turned(
    QKV, BIAS, NORM, COS, SIN, angle, t, inside, first, x, inverse,
    START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The part x from column START on of a head whose size is no power of two, normed by
    ``inverse`` and rotated; ``angle`` [N, 1] are the places of the tables' rows.
    """
    column = START + tl.arange(0, HALF)
    there = column < D
    is_first = column < D // 2
    other = tl.where(is_first, column + D // 2, column - D // 2)
    partner = _load(QKV, BIAS, t, inside, first + other, there, WIDTH)
    if NORM is not None:
        x = _rounded(x * inverse * _row(NORM, column, there))
        partner = _rounded(partner * inverse * _row(NORM, other, there))
    at = angle + tl.minimum(column, other)[None, :]
    cos = tl.load(COS + at, mask=there[None, :], other=0.0)
    sin = tl.load(SIN + at, mask=there[None, :], other=0.0)
    x, partner = x * cos, partner * sin  # subtracted, since -partner is 0 - partner in Triton
    return _rounded(tl.where(is_first[None, :], x - partner, x + partner))


@triton.jit
def _rotated(
    QKV, BIAS, NORM, cos, sin, angle, t, inside, first, epsilon, WIDTH: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HADAMARD: tl.constexpr
):  # fmt: skip
    """The head at column ``first``, normed, rotated, perhaps times H: two parts FP32 [N, HALF].

    ``cos`` and ``sin`` are the rotation's [N, HALF], or the tables where the parts are no halves.
    """
    j = tl.arange(0, HALF)
    if D == 2 * HALF:
        x1 = _load(QKV, BIAS, t, inside, first + j, None, WIDTH)
        x2 = _load(QKV, BIAS, t, inside, first + HALF + j, None, WIDTH)
        if NORM is not None:
            inverse = _inverse_root(x1, x2, epsilon, N, D, HALF)
            x1 = _rounded(x1 * inverse * _row(NORM, j, None))
            x2 = _rounded(x2 * inverse * _row(NORM, HALF + j, None))
        y1 = _rounded(x1 * cos - x2 * sin)
        y2 = _rounded(x2 * cos + x1 * sin)
        if HADAMARD:
            y1, y2 = hadamard(y1, y2, N, HALF)
    else:
        x1 = _load(QKV, BIAS, t, inside, first + j, None, WIDTH)
        x2 = _load(QKV, BIAS, t, inside, first + HALF + j, HALF + j < D, WIDTH)
        inverse = None if NORM is None else _inverse_root(x1, x2, epsilon, N, D, HALF)
        y1 = _turned(
            QKV, BIAS, NORM, cos, sin, angle, t, inside, first, x1, inverse, 0, WIDTH, D, HALF
        )
        y2 = _turned(
            QKV, BIAS, NORM, cos, sin, angle, t, inside, first, x2, inverse, HALF, WIDTH, D, HALF
        )
        if HADAMARD:  # of blocks of a third of D
            y1 = rotated(y1, N, HALF, 6 if HALF == 128 else 5)
            y2 = rotated(y2, N, HALF, 6 if HALF == 128 else 5)
    return y1, y2


@triton.jit
def _amax_bits(x):
    """[N, n] -> [N]: the bits of the largest magnitude, as an integer; a NaN is largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _scale_byte(amax_bits, GIVEN, WHICH: tl.constexpr):
    """E8M0 byte in int32, 255 where the vector is not finite; GIVEN has bytes of Q, K and V, of
    which WHICH is taken where it is not 0.
    """
    byte = ((tl.maximum(amax_bits, FLOOR_BITS) + _ROUND_UP_ABOVE_1_75) >> 23) - 8
    if GIVEN is not None:
        given = tl.load(GIVEN + WHICH).to(tl.int32)
        byte = tl.where(given > 0, given, byte)
    return tl.where(amax_bits >= _INF_BITS, 255, byte)


@triton.jit
def _to_e4m3(x, byte, GIVEN, BYTES: tl.constexpr):
    """FP32 [N, n] and bytes [N] -> E4M3, or its bytes."""
    factor = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(byte == 255, float("nan"), factor)
    x = x * factor[:, None]
    if GIVEN is not None:  # else at most 448, by the choice of the byte; a NaN stays
        x = tl.where(x > 448.0, 448.0, x)
        x = tl.where(x < -448.0, -448.0, x)
    if BYTES:
        return rounded(x)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def _raise_maximum(MAXIMA, amax_bits, inside, WHICH: tl.constexpr):
    """Raise a place of MAXIMA, the bits of FP32, by finite vectors."""
    if MAXIMA is not None:
        seen = tl.where(inside & (amax_bits < _INF_BITS), amax_bits, 0)
        tl.atomic_max(MAXIMA + WHICH, tl.max(seen, 0))


@triton.jit
def _encoded(x, amax_bits, GIVEN, WHICH: tl.constexpr, FORMAT: tl.constexpr):
    """FP32 [N, n] and their vectors' ``amax_bits`` [N] -> values in an 8-bit format."""
    if FORMAT == "int8":
        values, _ = to_int8(x, amax_bits[:, None])
        return values
    else:
        return _to_e4m3(x, _scale_byte(amax_bits, GIVEN, WHICH), GIVEN, FORMAT == "bytes")


@triton.jit
def _scale(amax_bits, GIVEN, WHICH: tl.constexpr, FORMAT: tl.constexpr):
    """The scales of K or V, [N]: E8M0 bytes or FP32, NaN where the vector is not finite."""
    if FORMAT == "int8":
        _, scale = to_int8(amax_bits.to(tl.float32, bitcast=True), amax_bits)
        return scale
    else:
        return _scale_byte(amax_bits, GIVEN, WHICH).to(tl.uint8)


@triton.jit
def _widened(x):
    """Values of 8 bits, E4M3 perhaps as bytes, -> FP16, which is exact."""
    if x.dtype == tl.uint8:
        return decoded(x) * 256.0
    else:
        return x.to(tl.float16)


@triton.jit
def _store_parts(OUT, row, inside, y1, y2, D: tl.constexpr, HALF: tl.constexpr):
    """Two parts of vectors as rows of OUT."""
    j = tl.arange(0, HALF)
    at = OUT + row[:, None] * D + j[None, :]
    tl.store(at, y1, mask=inside[:, None])
    tl.store(at + HALF, y2, mask=_within(inside[:, None], HALF + j, D, 2 * HALF, 0))


@triton.jit
def _queries(
    QKV, BIAS, NORM, cos, sin, angle, Q, Q_SCALE, GIVEN, MAXIMA, t, inside, written, unit, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, HADAMARD: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Up to HEADS query heads of N tokens, to Q [T, H, D]; those ``written`` raise the maximum."""
    for head in tl.range(unit * HEADS, tl.minimum(unit * HEADS + HEADS, H), num_stages=1):
        y1, y2 = _rotated(
            QKV, BIAS, NORM, cos, sin, angle, t, inside, head * D, epsilon,
            (H + 2 * G) * D, N, D, HALF, HADAMARD,
        )  # fmt: skip
        if HADAMARD:  # by a power of two: exact, where a division might be an approximation
            y1 *= 1.0 / (D & -D)
            y2 *= 1.0 / (D & -D)
        row = t * H + head
        if FORMAT == "bf16":
            _store_parts(Q, row, inside, y1.to(tl.bfloat16), y2.to(tl.bfloat16), D, HALF)
        else:
            bits = tl.maximum(_amax_bits(y1), _amax_bits(y2))
            _raise_maximum(MAXIMA, bits, written, 0)
            y1 = _encoded(y1, bits, GIVEN, 0, FORMAT)
            y2 = _encoded(y2, bits, GIVEN, 0, FORMAT)
            _store_parts(Q, row, inside, y1, y2, D, HALF)
            if FORMAT == "int8":
                scale = _scale(bits, GIVEN, 0, FORMAT)
            else:
                byte = _scale_byte(bits, GIVEN, 0)
                power = (byte << 23).to(tl.float32, bitcast=True)
                scale = tl.where(byte == 255, float("nan"), power)
            tl.store(Q_SCALE + row, scale, mask=inside)


@triton.jit
def _vector_row(t, slot, g, G: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr):
    """The place of the vectors of KV head g, counted in vectors."""
    if PAGED:
        return (slot // TILE * G + g) * TILE + slot % TILE
    else:
        return t * G + g


@triton.jit
def _keys(
    QKV, BIAS, NORM, cos, sin, angle, K, K_SCALE, GIVEN, MAXIMA, t, slot, inside, unit, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr,
    PAGED: tl.constexpr, HADAMARD: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Up to HEADS key heads of N tokens, to pages or packed; in qkv they follow the query heads."""
    for g in tl.range(unit * HEADS, tl.minimum(unit * HEADS + HEADS, G), num_stages=1):
        y1, y2 = _rotated(
            QKV, BIAS, NORM, cos, sin, angle, t, inside, (H + g) * D, epsilon,
            (H + 2 * G) * D, N, D, HALF, HADAMARD,
        )  # fmt: skip
        row = _vector_row(t, slot, g, G, TILE, PAGED)
        if FORMAT == "bf16":
            _store_parts(K, row, inside, y1.to(tl.bfloat16), y2.to(tl.bfloat16), D, HALF)
        else:
            bits = tl.maximum(_amax_bits(y1), _amax_bits(y2))
            _raise_maximum(MAXIMA, bits, inside, 1)
            y1 = _encoded(y1, bits, GIVEN, 1, FORMAT)
            y2 = _encoded(y2, bits, GIVEN, 1, FORMAT)
            _store_parts(K, row, inside, y1, y2, D, HALF)
            tl.store(K_SCALE + row, _scale(bits, GIVEN, 1, FORMAT), mask=inside)


@triton.jit
def _values(
    QKV, BIAS, V, V_SCALE, GIVEN, MAXIMA, t, slot, inside, g,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    PAGED: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """V as [token, D]."""
    d = tl.arange(0, 2 * HALF)
    there = None if D == 2 * HALF else d < D
    x = _load(QKV, BIAS, t, inside, (H + G + g) * D + d, there, (H + 2 * G) * D)
    row = _vector_row(t, slot, g, G, TILE, PAGED)
    at = V + row[:, None] * D + d[None, :]
    stored = _within(inside[:, None], d, D, 2 * HALF, 0)
    if FORMAT == "bf16":
        tl.store(at, x.to(tl.bfloat16), mask=stored)
    else:
        bits = _amax_bits(x)
        _raise_maximum(MAXIMA, bits, inside, 2)
        tl.store(at, _widened(_encoded(x, bits, GIVEN, 2, FORMAT)), mask=stored)
        tl.store(V_SCALE + row, _scale(bits, GIVEN, 2, FORMAT), mask=inside)


@triton.jit
def _value_bytes(
    QKV, BIAS, V_SCALE, GIVEN, MAXIMA, SLOT, first, i, tokens, g,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Rows i of N tokens -> the bytes of 8-bit values as int32 [rows, 2 HALF], slots and which of
    them exist; stores the scales.

    Rows are rotated so that a row's number is its slot's within N, if slots are consecutive.
    """
    t = first + ((i - (tl.load(SLOT + first) % N).to(tl.int32)) & (N - 1))
    slot = tl.load(SLOT + t, mask=t < tokens, other=-1)
    inside = slot >= 0
    d = tl.arange(0, 2 * HALF)
    there = None if D == 2 * HALF else d < D
    x = _load(QKV, BIAS, t, inside, (H + G + g) * D + d, there, (H + 2 * G) * D)
    bits = _amax_bits(x)
    _raise_maximum(MAXIMA, bits, inside, 2)
    row = _vector_row(t, slot, g, G, TILE, True)
    tl.store(V_SCALE + row, _scale(bits, GIVEN, 2, FORMAT), mask=inside)
    y = _encoded(x, bits, GIVEN, 2, FORMAT)
    return y.to(tl.uint8, bitcast=True).to(tl.int32), slot, inside


@triton.jit
def _store_bytes(
    V, y, slot, inside, g, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr
):
    """Rows of bytes [rows, 2 HALF] to their slots of transposed pages."""
    at = V.to(tl.pointer_type(tl.uint8)) + (slot // TILE * G + g) * (TILE * D) + slot % TILE
    d = tl.arange(0, 2 * HALF)
    stored = _within(inside[:, None], d, D, 2 * HALF, 0)
    tl.store(at[:, None] + d[None, :] * TILE, y.to(tl.uint8), mask=stored)


@triton.jit
def _transposed_values(
    QKV, BIAS, V, V_SCALE, GIVEN, MAXIMA, SLOT, tokens, g,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """V as [D, token]: a word at a time where four slots fill one, else a byte."""
    # Four loads of every fourth row: a thread then holds all four bytes of a word.
    first = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, N // 4) * 4
    y0, slot0, in0 = _value_bytes(
        QKV, BIAS, V_SCALE, GIVEN, MAXIMA, SLOT, first, i, tokens, g, H, G, D, HALF, TILE, N,
        FORMAT,
    )  # fmt: skip
    y1, slot1, in1 = _value_bytes(
        QKV, BIAS, V_SCALE, GIVEN, MAXIMA, SLOT, first, i + 1, tokens, g, H, G, D, HALF, TILE, N,
        FORMAT,
    )  # fmt: skip
    y2, slot2, in2 = _value_bytes(
        QKV, BIAS, V_SCALE, GIVEN, MAXIMA, SLOT, first, i + 2, tokens, g, H, G, D, HALF, TILE, N,
        FORMAT,
    )  # fmt: skip
    y3, slot3, in3 = _value_bytes(
        QKV, BIAS, V_SCALE, GIVEN, MAXIMA, SLOT, first, i + 3, tokens, g, H, G, D, HALF, TILE, N,
        FORMAT,
    )  # fmt: skip

    # [N / 4, 2 HALF] words, stored transposed: a page's row of TILE bytes is TILE / 4 words.
    whole = (
        in0 & (slot0 % 4 == 0) & (slot1 == slot0 + 1) & (slot2 == slot0 + 2) & (slot3 == slot0 + 3)
    )
    at = (
        V.to(tl.pointer_type(tl.int32))
        + (slot0 // TILE * G + g) * (TILE // 4 * D)
        + slot0 % TILE // 4
    )
    words = y0 | (y1 << 8) | (y2 << 16) | (y3 << 24)
    d = tl.arange(0, 2 * HALF)
    stored = _within(whole[None, :], d, D, 2 * HALF, 1)
    tl.store(at[None, :] + d[:, None] * (TILE // 4), tl.trans(words), mask=stored)

    # Ends of runs, and decode, where neighbours are of different sequences.
    apart = whole == 0
    if tl.max((apart & (in0 | in1 | in2 | in3)).to(tl.int32), 0) > 0:
        _store_bytes(V, y0, slot0, in0 & apart, g, G, D, HALF, TILE)
        _store_bytes(V, y1, slot1, in1 & apart, g, G, D, HALF, TILE)
        _store_bytes(V, y2, slot2, in2 & apart, g, G, D, HALF, TILE)
        _store_bytes(V, y3, slot3, in3 & apart, g, G, D, HALF, TILE)


@triton.jit(do_not_specialize=["tokens"])
def _encode_kernel(
    QKV, BIAS, Q_NORM, K_NORM, COS, SIN, POSITION, SLOT, Q, Q_SCALE, K, K_SCALE, V, V_SCALE,
    GIVEN, MAXIMA, tokens, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr, HADAMARD: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One program N tokens and HEADS query heads, or HEADS key heads, or one value head, in this
    order along axis 1 of the grid.  Without SLOT, K and V are packed.
    """
    QUERY_UNITS: tl.constexpr = (H + HEADS - 1) // HEADS
    KEY_UNITS: tl.constexpr = (G + HEADS - 1) // HEADS
    unit = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = t < tokens

    # Padding of a captured batch has a query, but no slot to write K and V to.
    slot = t
    written = inside
    if SLOT is not None:
        slot = tl.load(SLOT + t, mask=inside, other=-1)
        written = slot >= 0

    if unit < QUERY_UNITS + KEY_UNITS:
        # Rows of the rotation's tables [positions, D / 2], loaded once for all heads of the unit
        # where these are two halves.
        angle = tl.load(POSITION + t, mask=inside, other=0)[:, None] * (D // 2)
        cos = COS
        sin = SIN
        if D == 2 * HALF:
            at = angle + tl.arange(0, HALF)[None, :]
            cos = tl.load(COS + at)
            sin = tl.load(SIN + at)
        if unit < QUERY_UNITS:
            _queries(
                QKV, BIAS, Q_NORM, cos, sin, angle, Q, Q_SCALE, GIVEN, MAXIMA, t, inside, written,
                unit, epsilon,
                H, G, D, HALF, N, HEADS, HADAMARD, FORMAT,
            )  # fmt: skip
        else:
            _keys(
                QKV, BIAS, K_NORM, cos, sin, angle, K, K_SCALE, GIVEN, MAXIMA, t, slot, written,
                unit - QUERY_UNITS, epsilon,
                H, G, D, HALF, TILE, N, HEADS, SLOT is not None, HADAMARD, FORMAT,
            )  # fmt: skip
    else:
        g = unit - QUERY_UNITS - KEY_UNITS
        # Only pages of 8 bits hold V as [D, token].
        if FORMAT != "bf16" and SLOT is not None:
            _transposed_values(
                QKV, BIAS, V, V_SCALE, GIVEN, MAXIMA, SLOT, tokens, g, H, G, D, HALF, TILE, N,
                FORMAT,
            )  # fmt: skip
        else:
            _values(
                QKV, BIAS, V, V_SCALE, GIVEN, MAXIMA, t, slot, written, g, H, G, D, HALF,
                TILE, SLOT is not None, FORMAT,
            )  # fmt: skip


def encode_paged(
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: PagedKeys,
    as_bytes: bool = False,
) -> Queries:
    """qkv BF16 [T, (H + 2G) D], positions and slots int64 [T] -> the queries; K and V are written
    to the pages, in the pages' format.

    slot = page * 128 + offset, all different, in any order; a negative one (the padding of a
    captured batch) writes nothing.  The launch depends on T alone, so it can be captured.

    E4M3 is made by integer operations ``as_bytes``, on cards that lack it.
    """
    return _encode(qkv, transform, positions, slots, pages, as_bytes)


def encode_packed(
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    format: Format,
    as_bytes: bool = False,
) -> tuple[Queries, PackedKeys]:
    """qkv BF16 [T, (H + 2G) D] and positions int64 [T] -> queries, and packed K and V; ``as_bytes``
    as above.

    The maxima of ``transform`` are of what E4M3 would round, in BF16 by a second launch whose other
    results are dropped.

    Raises ConfigError for the FP32 format, which attention on a GPU does not take.
    """
    if format == "fp32":
        raise ConfigError(
            "the fp32 flow runs on the CPU: attention on a GPU takes e4m3, int8 and bf16"
        )
    vectors = (qkv.shape[0], transform.num_kv_heads)
    if format == "bf16" and transform.maxima is not None:
        unused = _empty_packed(vectors, transform.head_dim, DTYPES["e4m3"], qkv.device)
        _encode(qkv, replace(transform, hadamard=True), positions, None, unused, as_bytes)
    packed = _empty_packed(vectors, transform.head_dim, DTYPES[format], qkv.device)
    return _encode(qkv, transform, positions, None, packed, as_bytes), packed


def _empty_packed(
    vectors: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device
) -> PackedKeys:
    """Uninitialised K and V of [tokens, KV heads] vectors."""
    scale = SCALES.get(dtype)
    v = torch.bfloat16 if scale is None else torch.float16
    keys, values = (torch.empty((*vectors, dim), dtype=d, device=device) for d in (dtype, v))
    if scale is None:
        return PackedKeys(keys, None, values, None)
    key_scales, value_scales = torch.empty((2, *vectors), dtype=scale, device=device)
    return PackedKeys(keys, key_scales, values, value_scales)


def _encode(
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    slots: torch.Tensor | None,
    out: PagedKeys | PackedKeys,
    as_bytes: bool,
) -> Queries:
    tokens, heads, kv_heads, dim = (
        qkv.shape[0],
        transform.num_heads,
        transform.num_kv_heads,
        transform.head_dim,
    )
    if dim not in HEAD_SIZES or not qkv.is_contiguous():
        raise ValueError(
            f"heads of {dim}, contiguous: {qkv.is_contiguous()}; qkv must be contiguous, with head "
            f"sizes of {' or '.join(map(str, HEAD_SIZES))}"
        )
    values = torch.empty((tokens, heads, dim), dtype=out.keys.dtype, device=qkv.device)
    scales = (
        None
        if out.key_scales is None
        else torch.empty((tokens, heads), dtype=torch.float32, device=qkv.device)
    )
    plan = next(plan for plan in TILINGS if tokens <= plan.most)
    units = triton.cdiv(heads, plan.heads) + triton.cdiv(kv_heads, plan.heads) + kv_heads
    narrow = out.keys.dtype == E4M3
    given = transform.scale_bytes if narrow else None
    maxima = transform.maxima.view(torch.int32) if narrow and transform.maxima is not None else None
    if tokens:
        _encode_kernel[(triton.cdiv(tokens, plan.tokens), units)](
            qkv, transform.bias, transform.q_norm, transform.k_norm, transform.cos, transform.sin,
            positions, slots, _raw(values, as_bytes), scales,
            _raw(out.keys, as_bytes), out.key_scales, _raw(out.values, as_bytes), out.value_scales,
            given, maxima, tokens, transform.epsilon,
            heads, kv_heads, dim, triton.next_power_of_2(dim) // 2, PAGE_TOKENS, plan.tokens,
            plan.heads, transform.hadamard,
            "bytes" if narrow and as_bytes else _NAMES[out.keys.dtype], num_warps=plan.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Queries(values, scales)


@triton.jit
def _gather_kernel(
    K, K_SCALE, V, V_SCALE, TABLE, START, LENGTH, K_OUT, K_SCALE_OUT, V_OUT, V_SCALE_OUT,
    table_stride,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program N tokens and one KV head of one sequence; N divides a page, and D is counted to
    WIDTH, a power of two.
    """
    g = tl.program_id(0)
    first = tl.program_id(1) * N
    b = tl.program_id(2)
    length = tl.load(LENGTH + b)
    if first >= length:
        return
    offset = first % TILE + tl.arange(0, N)
    inside = first + tl.arange(0, N) < length
    d = tl.arange(0, WIDTH)
    along = None if D == WIDTH else (d < D)[None, :]
    down = None if D == WIDTH else (d < D)[:, None]
    stored = _within(inside[:, None], d, D, WIDTH, 0)
    page = tl.load(TABLE + b * table_stride + first // TILE).to(tl.int64) * G + g
    row = (tl.load(START + b).to(tl.int64) + first + tl.arange(0, N)) * G + g
    vector = page * TILE + offset
    out = row[:, None] * D + d[None, :]
    at = vector[:, None] * D + d[None, :]
    tl.store(K_OUT + out, tl.load(K + at, mask=along), mask=stored)
    if K_SCALE is None:
        tl.store(V_OUT + out, tl.load(V + at, mask=along), mask=stored)
    else:
        # V is read as [D, token] and stored transposed and widened.
        v = tl.load(V + (page * (TILE * D) + offset)[None, :] + d[:, None] * TILE, mask=down)
        tl.store(V_OUT + out, _widened(tl.trans(v)), mask=stored)
        tl.store(K_SCALE_OUT + row, tl.load(K_SCALE + vector), mask=inside)
        tl.store(V_SCALE_OUT + row, tl.load(V_SCALE + vector), mask=inside)


def gather_pages(
    pages: PagedKeys,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    total: int,
    max_length: int,
    as_bytes: bool = False,
) -> PackedKeys:
    """The first lengths[b] tokens of each sequence b, whose pages are table[b], at starts[b] of
    ``total`` packed tokens.

    table int32 [B, pages], starts and lengths int32 [B], the lengths at most max_length;
    ``as_bytes`` as above.
    """
    _, kv_heads, _, dim = pages.keys.shape
    out = _empty_packed((total, kv_heads), dim, pages.keys.dtype, pages.keys.device)
    _gather_kernel[(kv_heads, triton.cdiv(max_length, _GATHERED), lengths.numel())](
        _raw(pages.keys, as_bytes), pages.key_scales, _raw(pages.values, as_bytes),
        pages.value_scales, table, starts, lengths,
        _raw(out.keys, as_bytes), out.key_scales, out.values, out.value_scales,
        table.stride(0), kv_heads, dim, triton.next_power_of_2(dim), PAGE_TOKENS, _GATHERED,
        num_warps=4,
    )  # fmt: skip
    return out


def _raw(x: torch.Tensor, as_bytes: bool) -> torch.Tensor:
    """E4M3 as bytes, if a kernel takes it so."""
    return x.view(torch.uint8) if as_bytes and x.dtype == E4M3 else x
