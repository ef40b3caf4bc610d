"""One AdamW update of one tensor, in place: decoupled weight decay, bias correction and the clip of
the gradient in one pass.

    g  = clip * grad
    m  = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    master -= rate * weight_decay * master  +  rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 -
                                            beta2^t) + epsilon)

All in FP32, every operation rounded by itself and to nearest, so CPU and GPU give the same bits.
Decay and step are added before they are subtracted: at a learning rate of 1e-6 a factor 1 - rate *
weight_decay of its own would be rounded to 1.

The moments are FP32, or BF16 to halve their memory, or 8-bit codes to halve it again
(``isobit.kernels.spec.moments``).  Rounding v to the nearest BF16 would freeze it: with beta2 =
0.999 it decays by a thousandth a step, and half a unit in BF16's last place is two to four
thousandths.  So these moments are rounded stochastically: up with the probability that makes the
mean right, in BF16

    stored = the upper 16 bits of (bits of the FP32 number + noise),    noise uniform in 0 .. 65535

The noise is counter-based (``isobit.kernels.spec.noise``): element e takes output e + 1 of
splitmix64 seeded with a key of (seed, step, tensor), its lowest 16 bits for m and the next 16 for
v.  So it needs no state, a resumed run draws it again, no other tensor shares it, and a slice of a
tensor moves as it does in the whole.  The step itself is taken with the moments as they are before
they are rounded.
"""

import torch
from torch import Tensor

from isobit.kernels.adamw import GROUP, AdamWFactors, check_moments
from isobit.kernels.noise import splitmix64
from isobit.kernels.spec import moments

BF16_NAN = 0x7FC0

_PIECE = (
    1 << 17
    # elements that a CPU takes at once, so that what lies between the operations stays in its
    # cache; whole groups
)


@torch.no_grad()
def adamw_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factors: AdamWFactors,
    key: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    first_element: int = 0,
) -> None:
    """Move a master and its moments by one update, in place; the gradient stays as it is.

    Args:
        master: FP32, contiguous, of any shape, like the three others.
        grad: FP32.
        exp_avg: m, FP32 or BF16 or codes of 8 bits; zeros before the first update.
        exp_avg_sq: v, in the same format.
        factors: learning rate, decays and the clip.
        key: of the rounding, for moments of 16 and 8 bits (``isobit.kernels.adamw.noise_key``).
        scales: of m and of v, uint8 [groups], for moments of 8 bits.
        first_element: of the whole tensor, where these are a slice of it; a multiple of 128.
    """
    check_moments(master, grad, exp_avg, exp_avg_sq, key, scales, first_element)
    tensors = (master, grad, exp_avg, exp_avg_sq)
    flat = [x.view(-1).split(_PIECE) for x in tensors]
    for number, (w, g, m, v) in enumerate(zip(*flat, strict=True)):
        if key is None:
            _update(w, g, m, v, factors)
            continue
        drawn = _noise(key, first_element + number * _PIECE, w.numel())
        if scales is None:
            _update_16_bits(w, g, m, v, factors, drawn)
        else:
            groups = slice(number * _PIECE // GROUP, (number + 1) * _PIECE // GROUP)
            _update_8_bits(w, g, m, v, scales[0][groups], scales[1][groups], factors, drawn)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """FP32 -> BF16, up or down by int32 noise in 0 .. 65535; a NaN stays one, and so does an
    infinity.
    """
    bits = (x.view(torch.int32) + noise) >> 16
    return bits.masked_fill_(x.isnan(), BF16_NAN).to(torch.int16).view(torch.bfloat16)


def _noise(key: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Noise of the elements from ``first`` on, for m and for v: int32 in 0 .. 65535."""
    bits = splitmix64(torch.tensor([key]), torch.arange(first, first + count))
    return (bits & 0xFFFF).int(), (bits >> 16 & 0xFFFF).int()


def _update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, f: AdamWFactors) -> Tensor:
    """All FP32, in place; -> sqrt(v).

    One operation at a time: torch's combined ones (addcmul, lerp) round otherwise from one
    processor to the next.
    """
    g = g * f.clip
    m.mul_(f.beta1).add_(g * f.rest1)
    v.mul_(f.beta2).add_((g * g).mul_(f.rest2))
    root = (
        v.double().sqrt_().float()
    )  # torch's FP32 root on a CPU can be a unit in the last place off
    quotient = m / (root * f.root).add_(f.epsilon)
    w.sub_((w * f.decay).add_(quotient.mul_(f.size)))
    return root


def _update_16_bits(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, f: AdamWFactors, noise: tuple[Tensor, Tensor]
) -> None:
    first, second = m.float(), v.float()
    _update(w, g, first, second, f)
    m.copy_(round_stochastically(first, noise[0]))
    v.copy_(round_stochastically(second, noise[1]))


def _update_8_bits(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    m_scales: Tensor,
    v_scales: Tensor,
    f: AdamWFactors,
    noise: tuple[Tensor, Tensor],
) -> None:
    first, second = moments.decode_first(m, m_scales), moments.decode_second(v, v_scales)
    root = _update(w, g, first, second, f)
    for codes, scales, (new_codes, new_scales) in (
        (m, m_scales, moments.encode_first(first, noise[0])),
        (v, v_scales, moments.encode_second(root, noise[1])),
    ):
        codes.copy_(new_codes)
        scales.copy_(new_scales)
