"""E4M3 as bytes, by operations of integers: below sm_89 no instruction knows the format.

A byte s eeee mmm, moved into the bits s 0eeee mmm0000000 of an FP16, reads as 2^-8 of its number,
subnormals included, since the exponents' biases are 7 and 15.  So every product of two numbers is
one of FP16, 2^-16 of it.  NaN bytes read as +-480, as in ``isobit.kernels.spec.quantise``: a scale
of NaN makes them NaN again.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# (Triton's types do not know what a kernel computes with)

import triton
import triton.language as tl

_SMALLEST_NORMAL = tl.constexpr(0x3C800000)  # the bits of 2^-6 in FP32
_GRID = tl.constexpr(16384.0)  # in FP32 its neighbours are 2^-9 apart, as E4M3's subnormals
_GRID_BITS = tl.constexpr(0x46800000)
_BIASES = tl.constexpr((127 - 7) << 3)
_INF_BITS = tl.constexpr(0x7F800000)
PRODUCT_SCALE = tl.constexpr(65536.0)  # 2^16


@triton.jit
def decoded(byte):
    """uint8 -> FP16, 2^-8 of the numbers."""
    wide = byte.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def rounded(x):
    """FP32 -> uint8: to nearest even, at most 448 in size; a NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _BIASES
    subnormal = (tl.abs(x) + _GRID).to(tl.int32, bitcast=True) - _GRID_BITS
    byte = tl.minimum(tl.where(size < _SMALLEST_NORMAL, subnormal, normal), 0x7E)
    return tl.where(size > _INF_BITS, 0x7F, byte | ((bits >> 24) & 0x80)).to(tl.uint8)
