"""The quantisers once more, in plain Python from their written specification: no torch, no shared
code, one number at a time.

    amax    of the group; where it is not finite, the scale is NaN and every byte is 0x7F
    scale   max(amax, 2^-60) / 448, to the nearest FP32, or up to the next power of two
    byte    the E4M3 number nearest to x / scale (that quotient is an FP32 too), ties to the even
            one, 448 at most

This is what ``golden.safetensors`` was made with, and what the kernels of every back end are held
to.
"""

import math
import struct
from collections.abc import Sequence
from typing import Literal

_LARGEST = 448.0
_SMALLEST_AMAX = 2.0**-60
_NAN_BYTE = 0x7F
_GRID_BITS = 22

ScaleKind = Literal["power_of_two", "fp32"]


def to_fp32(x: float) -> float:
    """The nearest FP32, ties to even; beyond its range an infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def quantise_group(group: Sequence[float], kind: ScaleKind) -> tuple[list[int], float]:
    """The E4M3 bytes of FP32 numbers that share a scale, and that scale."""
    if not all(map(math.isfinite, group)):
        return [_NAN_BYTE] * len(group), math.nan
    amax = max(_SMALLEST_AMAX, *map(abs, group))
    scale = (
        power_of_two_from(amax / _LARGEST) if kind == "power_of_two" else to_fp32(amax / _LARGEST)
    )
    return [e4m3_byte(to_fp32(x / scale)) for x in group], scale


def power_of_two_from(x: float) -> float:
    """The smallest power of two that is at least x > 0."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def e4m3_byte(x: float) -> int:
    """The byte of the E4M3 number nearest to a finite x: 1 bit of sign, 4 of exponent (bias 7), 3
    of mantissa; subnormals below 2^-6.
    """
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    size = min(abs(x), _LARGEST)
    exponent = max(math.frexp(size)[1] - 1, -6) if size else -6
    steps = round(math.ldexp(size, 3 - exponent))  # Python rounds halves to even
    if steps == 16:
        exponent, steps = exponent + 1, 8
    return sign | (((exponent + 7) << 3) + steps - 8 if steps >= 8 else steps)


def e4m3_value(byte: int) -> float:
    """The number that a byte other than NaN's stands for."""
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if byte & 0x80 else size


def snap_group(group: Sequence[float]) -> list[float]:
    """Finite numbers rounded to multiples of 2^(k - 22), where 2^k <= amax < 2^(k+1): the grid of
    BF16 and FP32 products.
    """
    amax = max(map(abs, group))
    exponent = math.frexp(amax)[1] - 1 if amax >= 2.0**-126 else -127
    return [
        math.ldexp(round(math.ldexp(x, _GRID_BITS - exponent)), exponent - _GRID_BITS)
        for x in group
    ]  # no zero is negative


def splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` + 1 of the generator: what the sampling noise is made of."""
    whole = (1 << 64) - 1
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & whole
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & whole
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & whole
    return bits ^ bits >> 31
