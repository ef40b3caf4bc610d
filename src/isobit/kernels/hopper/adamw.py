"""AdamW on a GPU: one pass over master, gradient and moments, with the bits of
``isobit.kernels.spec.adamw``.

An element costs 28 bytes with FP32 moments, 20 with BF16 ones and 16 with 8-bit ones.  Division and
square root are the rounded ones, no product is fused with a sum, and the noise is a function of the
element's number in the whole tensor: nothing depends on the launch.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.adamw import GROUP, AdamWFactors, check_moments
from isobit.kernels.hopper.moments import decode_first, decode_second, encode_first, encode_second
from isobit.kernels.hopper.noise import splitmix64
from isobit.kernels.spec.adamw import BF16_NAN

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
    """Moments in FP32, or with NOISE in BF16; one program WIDTH elements of n, the tensor's from
    ``first`` on.
    """
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
    """Moments in 8 bits; one program GROUPS groups of 128 elements, of n elements, the tensor's
    from ``first`` on.
    """
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
    """What ``isobit.kernels.spec.adamw.adamw_step`` says; ``key`` is the noise's, None for FP32
    moments.
    """
    check_moments(master, grad, exp_avg, exp_avg_sq, key, scales, first_element)
    n, f = master.numel(), factors
    numbers = (f.clip, f.beta1, f.rest1, f.beta2, f.rest2, f.root, f.epsilon, f.size, f.decay)
    grid, options = (triton.cdiv(n, _WIDTH),), {"num_warps": 4, "enable_fp_fusion": False}
    if scales is None:
        number = 0 if key is None else key
        _adamw_kernel[grid](
            master,
            grad,
            exp_avg,
            exp_avg_sq,
            n,
            number,
            first_element,
            *numbers,
            _WIDTH,
            key is not None,
            **options,
        )
        return
    codes = exp_avg.view(torch.uint8), exp_avg_sq
    _adamw_8_bits_kernel[grid](
        master, grad, *codes, *scales, n, key, first_element, *numbers, _WIDTH // GROUP, **options
    )
