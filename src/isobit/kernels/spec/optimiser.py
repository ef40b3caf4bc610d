"""The optimiser: AdamW with moments of 32, 16 or 8 bits, norms of gradients, and checksums.

**AdamW** updates one tensor in place: decoupled weight decay, bias correction and the clip of the
gradient in one pass.

    g  = clip * grad
    m  = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    master -= rate * weight_decay * master  +  rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 -
                                            beta2^t) + epsilon)

Everything is FP32, and every operation is rounded by itself to nearest, so CPU and GPU give the
same bits.  Decay and step are added before they are subtracted: at a learning rate of 1e-6 a
separate factor 1 - rate * weight_decay would be rounded to 1.

**Moments of 16 bits** are rounded stochastically: up with the probability that makes the mean
right.  Rounding v to the nearest BF16 would freeze it: with beta2 = 0.999 it decays by a thousandth
per step, and half a unit in BF16's last place is two to four thousandths.

    stored = the upper 16 bits of (bits of the FP32 number + noise),    noise uniform in 0 .. 65535

The noise is counter-based (``isobit.kernels.noise``): element e takes output e + 1 of splitmix64
seeded with a key of (seed, step, tensor), its lowest 16 bits for m and the next 16 for v.  So it
needs no state, a resumed run draws it again, no other tensor shares it, and a slice of a tensor is
updated as it would be in the whole.  The step itself uses the moments before they are rounded.

**Moments of 8 bits** are codes, with one scale per group of 128 elements that are consecutive in
memory:

    m          = (-1)^sign * E4M3 * 2^(scale - 127)         3 bits of mantissa, 2^-9 to 448
    sqrt(v)    =             E4M4 * 2^(scale - 127)         4 bits of mantissa, 2^-10 to 496

The scale is the exponent of the smallest power of two that holds the group's largest element.  A
finer scale would change slightly in every step and round every element of the group anew; this one
rarely changes, and then only the smallest elements are rounded for it.  v is stored as its root,
which needs half the range of exponents, and without a sign, which makes it twice as fine as E4M3.
That matters: v wanders among its codes, and the mean step is longer than with the v that it
fluctuates around, as if the learning rate were about 1% higher (``experiments.moments``;
docs/memory.md has the figures).

Rounding is stochastic and keeps the mean of what decays linearly: m, and v itself.  Between
neighbouring roots lo < hi

    P(hi) = (v - lo^2) / (hi^2 - lo^2).

Rounding the root to its own mean would add its variance to v in every step.

A v above 0 never becomes 0: its smallest code stands for everything below it.  m, too, is rounded
in units of the group's largest element, so if v were 0, an element with small gradients would
occasionally have an m of one unit over a root of 0 and take a huge step.  Over the smallest root
that m is a few times an ordinary step.  So elements whose gradients are below some 2^-18 of the
group's largest (four millionths) move in the right direction on average, but less than AdamW says.

A group with a number that is not finite becomes NaN as a whole: scale 255.

**Norms.**  ``gradient_squares`` gives sums of squares in FP64, one per 128 rows.  The order of a
sum depends on its own rows alone, so a slice that begins at a multiple of 128 rows gives the same
sums as the whole tensor, whichever rank holds it.

**Checksums** are those of ``isobit.kernels.noise``, computed one chunk at a time.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from isobit.kernels.noise import (
    CHUNK,
    FIRST,
    GROUP,
    SEED,
    WORD,
    AdamWFactors,
    Rows,
    check_moments,
    splitmix64,
    splitmix64_of,
)
from isobit.kernels.spec.pointwise import row_sum
from isobit.precision.quant_tensor import BLOCK

NOT_FINITE = 255
# Added to the bits of a group's largest number, these carry into its exponent exactly if its
# mantissa is above that of 448 or of 496.
ABOVE_448, ABOVE_496 = 0x1FFFFF, 0x07FFFF
REBIAS = 2.0**120  # the exponent of FP32 has a bias of 127, that of the codes one of 7

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scales -> m, FP32 [N]."""
    bits = codes.view(torch.uint8).int()
    return _value(bits & 0x7F | (bits & 0x80) << 4, 3) * _of_elements(scales, codes.numel())


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scales -> v, FP32 [N]."""
    root = _value(codes.int(), 4) * _of_elements(scales, codes.numel())
    return root * root


def encode_first(m: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 m [N] and int32 noise in 0 .. 65535 -> codes [N] and scales."""
    groups = _in_groups(m)
    scales, inverse, bad = _scales(groups, ABOVE_448)
    bits = ((groups * inverse).abs_() / REBIAS).view(torch.int32)
    codes = (bits + (_in_groups(noise) << 4) + 8) >> 20  # 8 is half a step of the noise
    codes |= groups.view(torch.int32) >> 24 & 0x80
    return _bytes(codes.masked_fill_(bad, 0), m.numel()).view(FIRST), scales


def encode_second(root: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 sqrt(v) [N] and int32 noise in 0 .. 65535 -> codes [N] and scales."""
    groups = _in_groups(root)
    scales, inverse, bad = _scales(groups, ABOVE_496)
    scaled = groups * inverse
    codes = (scaled / REBIAS).view(torch.int32) >> 19
    low, high = _value(codes, 4), _value(codes + 1, 4)
    drawn = (_in_groups(noise).float() + 0.5) * ((high - low) * (high + low))
    codes += drawn < (scaled - low) * (scaled + low) * 65536.0
    codes = torch.maximum(codes, (groups > 0).int())
    return _bytes(codes.masked_fill_(bad, 0), root.numel()), scales


def _value(codes: Tensor, mantissa: int) -> Tensor:
    """The FP32 number of an int32 code, whose sign stands above eight bits of exponent; subnormal
    codes become subnormal FP32 numbers first.
    """
    return (codes << 23 - mantissa).view(torch.float32) * REBIAS


def _of_elements(scales: Tensor, count: int) -> Tensor:
    """The FP32 scale of each element; scale 255 is infinity, so that even a code of 0 becomes
    NaN.
    """
    return (scales.int() << 23).view(torch.float32).repeat_interleave(GROUP)[:count]


def _in_groups(x: Tensor) -> Tensor:
    """[N] -> [groups, 128], padded with zeros at the end."""
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def _scales(groups: Tensor, above: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of the scales, their FP32 reciprocals [groups, 1], and which groups hold a number
    that is not finite [groups, 1].
    """
    # Compared as integers, a NaN is above every number.
    largest = (groups.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    bad = largest >= _INFINITY
    exponent = ((largest + above >> 23) - 8).clamp_(min=1)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return exponent.masked_fill_(bad, NOT_FINITE).view(-1).to(torch.uint8), inverse, bad


def _bytes(codes: Tensor, count: int) -> Tensor:
    return codes.view(-1)[:count].to(torch.uint8)


BF16_NAN = 0x7FC0

# Elements that a CPU updates at once, so that intermediate results stay in its cache; whole groups.
_PIECE = 1 << 17


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
    """Update a master and its moments in place; the gradient is not changed.

    Args:
        master: FP32, contiguous, of any shape, like the three others.
        grad: FP32.
        exp_avg: m, in FP32, BF16 or 8-bit codes; zeros before the first update.
        exp_avg_sq: v, in the same format.
        factors: learning rate, decays and the clip.
        key: for the rounding of 16-bit and 8-bit moments (``isobit.kernels.noise.noise_key``).
        scales: of m and of v, uint8 [groups], for 8-bit moments.
        first_element: where the slice begins in the whole tensor; a multiple of 128.
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
    """FP32 -> BF16, up or down by int32 noise in 0 .. 65535; NaN and infinity stay."""
    bits = (x.view(torch.int32) + noise) >> 16
    return bits.masked_fill_(x.isnan(), BF16_NAN).to(torch.int16).view(torch.bfloat16)


def _noise(key: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Noise of the elements from ``first`` on, for m and for v: int32 in 0 .. 65535."""
    bits = splitmix64(torch.tensor([key]), torch.arange(first, first + count))
    return (bits & 0xFFFF).int(), (bits >> 16 & 0xFFFF).int()


def _update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, f: AdamWFactors) -> Tensor:
    """The update of FP32 moments, in place; returns sqrt(v).

    It takes one operation at a time: torch's combined ones (addcmul, lerp) round differently from
    one processor to the next.
    """
    g = g * f.clip
    m.mul_(f.beta1).add_(g * f.rest1)
    v.mul_(f.beta2).add_((g * g).mul_(f.rest2))
    # torch's FP32 square root on a CPU can be off by one unit in the last place.
    root = v.double().sqrt_().float()
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
    first, second = decode_first(m, m_scales), decode_second(v, v_scales)
    root = _update(w, g, first, second, f)
    for codes, scales, (new_codes, new_scales) in (
        (m, m_scales, encode_first(first, noise[0])),
        (v, v_scales, encode_second(root, noise[1])),
    ):
        codes.copy_(new_codes)
        scales.copy_(new_scales)


def checksum(rows: Sequence[Rows]) -> int:
    """See ``Backend``.  Needs 16 MiB beside a tensor, for the products of a chunk."""
    return sum(map(_of, rows)) % (1 << 64)


def _of(rows: Rows) -> int:
    word, ahead = divmod(rows.first_byte, WORD)
    chunk, place = divmod(word, CHUNK)
    words, total = _words(rows.tensor, ahead), 0
    while len(words):
        part, words = words[: CHUNK - place], words[CHUNK - place :]
        products = part * _inner(CHUNK)[place : place + len(part)]
        total += (splitmix64_of(rows.seed, chunk) | 1) * int(products.sum())
        chunk, place = chunk + 1, 0
    return total


def _words(rows: torch.Tensor, ahead: int) -> torch.Tensor:
    """int32 [W]: the bytes behind ``ahead`` zeros."""
    data = rows.contiguous().reshape(-1).view(torch.uint8)
    missing = -(ahead + len(data)) % WORD
    if ahead or missing:
        data = pad(data, (ahead, missing))
    elif data.data_ptr() % WORD:  # mapped from a file, after numbers of fewer bytes
        data = data.clone()
    return data.view(torch.int32)


@cache
def _inner(count: int) -> torch.Tensor:
    """u_i, int64."""
    indices = torch.arange(count)
    return splitmix64(torch.full_like(indices, SEED), indices) | 1


_NUMBERS_AT_A_TIME = 1 << 18


def gradient_squares(grads: Sequence[torch.Tensor]) -> list[float]:
    """FP32 tensors [R, ..] -> the sums of rows 0 .. 127, 128 .. 255, .. of the first tensor, then
    of the next; NaN or infinite where an element is.  A vector's rows are its elements.
    """
    return [one for grad in grads if grad.numel() for one in _of_blocks(grad.view(len(grad), -1))]


def _of_blocks(grad: torch.Tensor) -> list[float]:
    """[R, C] -> its sums; takes as many rows at a time as fit in a cache."""
    rows = BLOCK * max(1, _NUMBERS_AT_A_TIME // (BLOCK * grad.shape[1]))
    made: list[float] = []
    for some in grad.split(rows):
        of_rows = row_sum(some.double().square_()).view(-1)
        padded = torch.nn.functional.pad(of_rows, (0, -len(of_rows) % BLOCK))
        made += padded.view(-1, BLOCK).sum(1).tolist()
    return made


def add_in_order(total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
    """((total + a0) + a1) + .., element by element in FP32, in place."""
    for addend in addends:
        total.add_(addend)
