"""``isobit.kernels.spec.hadamard`` of vectors in registers, with its bits, for the kernels between
the qkv GEMM and attention.

A vector is two halves there, since the rotation pairs j with D / 2 + j, and a half lies in a few
neighbouring threads of one warp: pairs that are close stand in one thread, the others cost a
shuffle.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# (Triton's types do not know what a kernel computes with)

import triton
import triton.language as tl


@triton.jit
def _pairs(x, APART: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr):
    """FP32 [N, SIZE]: (a, b) -> (a + b, a - b) of numbers that are so far apart."""
    pairs: tl.constexpr = SIZE // (2 * APART)
    bits = tl.reshape(x, [N, pairs, 2, APART]).to(tl.int32, bitcast=True)
    # A sum of two integers less one of them is the other one: Triton has sums along an axis, which
    # become shuffles, and no way to ask for the neighbour.
    other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    sign = (tl.arange(0, 2) << 31)[None, None, :, None]
    own = (bits ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(other + own, [N, SIZE])


@triton.jit
def hadamard(x1, x2, N: tl.constexpr, HALF: tl.constexpr):
    """The halves of N vectors, FP32 [N, HALF] -> those of H x."""
    for level in tl.static_range(6 if HALF == 64 else 5):
        x1 = _pairs(x1, 1 << level, N, HALF)
        x2 = _pairs(x2, 1 << level, N, HALF)
    return x1 + x2, x1 - x2
