"""AdamW's moments in 8 bits: codes of an element, and a scale for 128 elements.

A moment of N elements is N codes and ceil(N / 128) scales, of groups of 128 elements that follow
one another in memory:

    m          = (-1)^sign * E4M3 * 2^(scale - 127)         3 bits of mantissa, 2^-9 to 448
    sqrt(v)    =             E4M4 * 2^(scale - 127)         4 bits of mantissa, 2^-10 to 496

The scale is the exponent of a power of two, the least that holds the group's largest element.  A
finer scale would move by a hair in every step and round every element of the group anew; this one
mostly stands, and where it moves only the smallest elements are rounded for it. v is stored by its
root, which needs half the range of exponents, and without a sign, which leaves it twice as fine as
E4M3 would be. That matters: v wanders among its codes, and steps are longer in the mean than with
the v about which it does, as if the learning rate were about 1% higher (``benchmarks.moments``;
docs/memory.md has its figures).

Rounding is stochastic, and right in the mean for what decays linearly: m, and v itself.  Between
neighbouring roots lo < hi

    P(hi) = (v - lo^2) / (hi^2 - lo^2).

Rounding the root to its own mean would add its variance to v in every step.

A v above 0 never becomes 0: its smallest code stands for all that is below it.  m is rounded in
units of the group's largest, too, so were v gone, an element of small gradients would now and then
find an m of one unit over a root of nothing, and leap.  Over the smallest root that m is a few
times an ordinary step.  So elements whose gradients are below some 2^-18 of the group's largest
(four millionths) move in the right direction on average, but less than AdamW says.

A group with a number that is not finite becomes NaN as a whole: scale 255.
"""

import torch
from torch import Tensor

from isobit.kernels.adamw import FIRST, GROUP

NOT_FINITE = 255
# added to the bits of a group's largest number, they carry into its exponent exactly if its
# mantissa is above that of 448, and of 496
ABOVE_448, ABOVE_496 = 0x1FFFFF, 0x07FFFF
REBIAS = 2.0**120  # the exponent of FP32 has a bias of 127, that of the codes one of 7

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """-> m, FP32 [N]."""
    bits = codes.view(torch.uint8).int()
    return _value(bits & 0x7F | (bits & 0x80) << 4, 3) * _of_elements(scales, codes.numel())


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """-> v, FP32 [N]."""
    root = _value(codes.int(), 4) * _of_elements(scales, codes.numel())
    return root * root


def encode_first(m: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 m [N] and int32 noise in 0 .. 65535 -> codes [N] and scales."""
    groups = _in_groups(m)
    scales, inverse, bad = _scales(groups, ABOVE_448)
    bits = ((groups * inverse).abs_() / REBIAS).view(torch.int32)
    codes = (bits + (_in_groups(noise) << 4) + 8) >> 20  # 8 is half of what the noise counts by
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
    """The FP32 number of an int32 code, a sign in front of eight bits of exponent; FP32's subnormal
    numbers make the codes'.
    """
    return (codes << 23 - mantissa).view(torch.float32) * REBIAS


def _of_elements(scales: Tensor, count: int) -> Tensor:
    """The FP32 scale of each element; scale 255 is infinity, and so a code of 0 under it NaN."""
    return (scales.int() << 23).view(torch.float32).repeat_interleave(GROUP)[:count]


def _in_groups(x: Tensor) -> Tensor:
    """[N] -> [groups, 128], zeros in the end."""
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def _scales(groups: Tensor, above: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> the bytes of the scales, their FP32 reciprocals [groups, 1], and which groups hold a
    number that is not finite [groups, 1].
    """
    largest = (groups.view(torch.int32) & _MAGNITUDE).amax(
        1, keepdim=True
    )  # as integers a NaN is above all
    bad = largest >= _INFINITY
    exponent = ((largest + above >> 23) - 8).clamp_(min=1)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return exponent.masked_fill_(bad, NOT_FINITE).view(-1).to(torch.uint8), inverse, bad


def _bytes(codes: Tensor, count: int) -> Tensor:
    return codes.view(-1)[:count].to(torch.uint8)
