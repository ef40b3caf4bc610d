"""What decode and prefill share of a tile of keys (``isobit.kernels.triton.attention``)."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import triton
import triton.language as tl

from isobit.kernels.triton.e4m3 import decoded
from isobit.precision.quant_tensor import AMAX_FLOOR

_SMALLEST_SCALE = tl.constexpr(AMAX_FLOOR / 128)  # below every FP32 scale


@triton.jit
def _power_of_two(exponent):
    """Biased exponent -> 2^(exponent - 127) in FP32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _factor(scale, BYTES: tl.constexpr = False):
    """E8M0 byte or FP32 scale -> FP32.  BYTES: values of E4M3 are bytes, whose NaN is here."""
    if scale.dtype != tl.uint8:
        return scale
    elif BYTES:
        return tl.where(scale == 255, float("nan"), _power_of_two(scale))
    else:
        return _power_of_two(scale)


@triton.jit
def _at_least(scale):
    """V's FP32 scales.  Those of tokens that were never written are 0: their probability is 0, and
    is multiplied by numbers that have to be finite.  A NaN stays.
    """
    return tl.maximum(scale, _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log2(scale, BYTES: tl.constexpr):
    """V's scales, E8M0 bytes or FP32 -> their base-2 logarithms in FP32; BYTES as above."""
    if scale.dtype != tl.uint8:
        return tl.math.log2(_at_least(scale))
    elif BYTES:
        return tl.where(scale == 255, float("nan"), scale.to(tl.float32) - 127.0)
    else:
        return scale.to(tl.float32) - 127.0


@triton.jit
def _inverse(scale):
    """V's scales, E8M0 bytes or FP32 -> their inverses in FP32."""
    if scale.dtype == tl.uint8:
        return _power_of_two(254 - scale.to(tl.int32))
    else:
        return 1.0 / _at_least(scale)


@triton.jit
def _multiplied(x):
    """Q or K as the tensor cores take them: bytes of E4M3 as FP16, 2^-8 of the numbers."""
    if x.dtype == tl.uint8:
        return decoded(x)
    else:
        return x


@triton.jit
def _within(mask, d, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """A mask for vectors of D numbers whose ``d`` counts to WIDTH, a power of two, along the axis
    that is not AXIS.
    """
    if D == WIDTH:
        return mask
    else:
        return mask & tl.expand_dims(d < D, AXIS)


@triton.jit
def _partial_sums(x, TILE: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """(TILE, N) or (N, TILE) -> 32 partial sums a query, adding keys that differ in bit 3 and (of
    128) bit 6, which one thread holds.
    """
    if KEYS_FIRST:
        x = tl.sum(tl.reshape(x, [TILE // 16, 2, 8, N]), 1)
        if TILE == 128:
            x = tl.sum(tl.reshape(x, [2, 4, 8, N]), 0)
        return tl.reshape(x, [4, 8, N])
    else:
        x = tl.sum(tl.reshape(x, [N, TILE // 16, 2, 8]), 2)
        if TILE == 128:
            x = tl.sum(tl.reshape(x, [N, 2, 4, 8]), 1)
        return tl.reshape(x, [N, 4, 8])


@triton.jit
def _final_sum(x, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """32 partial sums a query -> (N,), halving one bit of the index at a time."""
    if KEYS_FIRST:
        x = tl.sum(tl.sum(tl.reshape(x, [2, 2, 8, N]), 0), 0)
        return tl.sum(tl.sum(tl.reshape(tl.sum(tl.reshape(x, [2, 4, N]), 0), [2, 2, N]), 0), 0)
    else:
        x = tl.sum(tl.sum(tl.reshape(x, [N, 2, 2, 8]), 1), 1)
        return tl.sum(tl.sum(tl.reshape(tl.sum(tl.reshape(x, [N, 2, 4]), 1), [N, 2, 2]), 1), 1)


@triton.jit
def _finite(m, WINDOW: tl.constexpr):
    """The maximum to subtract in exponents; under a window a query may have seen no key."""
    if WINDOW:
        return tl.where(m == -float("inf"), 0.0, m)
    else:
        return m


@triton.jit
def _weigh(
    qk, seen, q_scale, k_scale, v_scale, c, m, l, MASKED, TILE: tl.constexpr, N: tl.constexpr,
    AXIS: tl.constexpr, SCALED: tl.constexpr, BYTES: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """A tile's products q . k, of N queries and with the keys along AXIS -> p, the new maximum and
    sum, and the factor that the old ones decay by.
    """
    # Base-2 exponents s.  They include log2(s_v), so that p carries V's scale and the second
    # product takes V's values as they are; ``terms`` removes it from the sum.  A power of two
    # rounds nothing.
    if SCALED:
        k_factor = tl.expand_dims(_factor(k_scale, BYTES), 1 - AXIS)
        s = tl.math.fma(
            qk.to(tl.float32) * k_factor,
            tl.expand_dims(q_scale, AXIS),
            tl.expand_dims(_log2(v_scale, BYTES), 1 - AXIS),
        )
    else:
        s = qk
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    # BF16: s is the plain product here, and c comes in with the subtraction of the maximum.
    if SCALED:
        m_new = tl.maximum(m, tl.max(s, AXIS))
        finite = _finite(m_new, WINDOW)
        p = tl.math.exp2(s - tl.expand_dims(finite, AXIS))
        terms = p * tl.expand_dims(_inverse(v_scale), 1 - AXIS)
    else:
        m_new = tl.maximum(m, tl.max(s, AXIS) * c)
        finite = _finite(m_new, WINDOW)
        p = tl.math.exp2(tl.math.fma(s, c, -tl.expand_dims(finite, AXIS)))
        terms = p
    decay = tl.math.exp2(m - finite)
    if AXIS == 0:
        l = tl.math.fma(l, decay[None, None, :], _partial_sums(terms, TILE, N, True))
    else:
        l = tl.math.fma(l, decay[:, None, None], _partial_sums(terms, TILE, N, False))
    return p, m_new, l, decay


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first key that the query at a position sees; WINDOW is 0 where there is none."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return 0


@triton.jit
def _with_sink(o, m, l, SINKS, head, AXIS: tl.constexpr):
    """Add the sink of each query's head, if there are any; o has D along AXIS, or alone."""
    if SINKS is None:
        return o, m, l
    else:
        score = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, score)
        decay = tl.math.exp2(m - m_new)
        l = tl.math.fma(l, decay, tl.math.exp2(score - m_new))
        return o * (decay if AXIS is None else tl.expand_dims(decay, AXIS)), m_new, l


@triton.jit
def _join(o, m, l, part_o, part_m, part_l, AXIS: tl.constexpr):
    """Join a part to the earlier ones; o has D along AXIS, or alone."""
    m_new = tl.maximum(m, part_m)
    old = tl.math.exp2(m - m_new)
    new = tl.math.exp2(part_m - m_new)
    if AXIS is None:
        o = tl.math.fma(part_o, new, o * old)
    else:
        by_query = tl.broadcast_to(tl.expand_dims(new, AXIS), part_o.shape)
        o = tl.math.fma(part_o, by_query, o * tl.expand_dims(old, AXIS))
    return o, m_new, tl.math.fma(part_l, new, l * old)


@triton.jit
def _added(o, m, l, part_o, part_m, part_l, AXIS: tl.constexpr):
    """``_join``, or the part as it is where no key was seen before: not even a zero's sign changes
    then.
    """
    joined_o, joined_m, joined_l = _join(o, m, l, part_o, part_m, part_l, AXIS)
    is_first = m == -float("inf")
    o = tl.where(tl.expand_dims(is_first, AXIS), part_o, joined_o)
    return o, tl.where(is_first, part_m, joined_m), tl.where(is_first, part_l, joined_l)
