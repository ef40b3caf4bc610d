"""The counter-based noise of ``isobit.kernels.spec.noise`` inside a kernel: output i + 1 of
splitmix64 is mix(seed + (i + 1) * golden).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def splitmix64(seed, index):
    """Output number ``index`` + 1 of the generator, all uint64."""
    bits = seed + (index + 1) * _GOLDEN
    bits ^= bits >> 30
    bits *= _MULTIPLIER_1
    bits ^= bits >> 27
    bits *= _MULTIPLIER_2
    return bits ^ (bits >> 31)
