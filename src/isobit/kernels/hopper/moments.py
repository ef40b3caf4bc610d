"""The 8-bit moments of ``isobit.kernels.spec.moments`` inside a kernel, with the same bits: tiles
of [groups, 128] elements, scales [groups, 1].

Codes are read and written as bytes: the conversions between them and FP32 are shifts and a product
with a power of two.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import triton
import triton.language as tl

from isobit.kernels.spec import moments

_ABOVE_448, _ABOVE_496 = tl.constexpr(moments.ABOVE_448), tl.constexpr(moments.ABOVE_496)
_NOT_FINITE = tl.constexpr(moments.NOT_FINITE)
_REBIAS, _UNBIAS = tl.constexpr(moments.REBIAS), tl.constexpr(1 / moments.REBIAS)
_MAGNITUDE, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)


@triton.jit
def _value(codes, MANTISSA: tl.constexpr):
    """The FP32 number of an int32 code, a sign in front of eight bits of exponent."""
    return (codes << (23 - MANTISSA)).to(tl.float32, bitcast=True) * _REBIAS


@triton.jit
def _of_byte(scales):
    """FP32 scales."""
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
    """-> the bytes of the scales, their FP32 reciprocals, and which groups hold a number that is
    not finite.
    """
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
