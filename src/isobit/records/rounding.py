"""When rewards are equal but for rounding.

``0.1 * 3`` and ``0.3`` are one reward to their author, and two FP64 numbers. Taken for
different, they would make a group teach what the order of a sum was: divided by their standard
deviation, or by Adam's second moment, such a difference moves the weights as a real one does.

A reward is the end of a short sum, so that its error is some units in the last place of the
largest number in it: of FP64, or of FP32 where a reward was computed with tensors. Whole numbers
are exact, and differ where they differ.

    equal    max - min <= some units * largest magnitude, which for FP64 is taken for at least 1:
             0.1 + 0.2 - 0.3 is 0
"""

import math
from collections.abc import Iterable
from struct import pack, unpack

FP64 = 8 * 2.0**-52
FP32 = 4 * 2.0**-23
_SHORT = 12
"""Bits of a significand; one that has no more, as of 0.5, 0.75 or 20.25, is in every format."""


def are_level(values: Iterable[float]) -> bool:
    """Whether finite numbers differ by rounding at most; true without any."""
    numbers = list(values)
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    if low == high:
        return True
    if float(low).is_integer() and float(high).is_integer():
        return False
    largest, spread = max(abs(low), abs(high)), high - low
    if spread <= FP64 * max(largest, 1.0):
        return True
    return spread <= FP32 * largest and any(map(_is_of_fp32, numbers))


def settled(value: float, *marks: float) -> float:
    """The first of ``marks`` that a number is but for rounding, or the number itself."""
    return next((mark for mark in marks if are_level((value, mark))), value)


def rounded_sum(terms: Iterable[float]) -> float:
    """The sum in the order of the terms; 0 where they cancel but for rounding."""
    numbers = list(terms)
    total = sum(numbers, start=0.0)
    largest = max(map(abs, numbers), default=0.0)
    return 0.0 if abs(total) <= FP64 * largest else total


def _is_of_fp32(value: float) -> bool:
    """Whether a number is one of FP32 that fills its significand, as 0.1 in FP32 does."""
    try:
        (single,) = unpack("<f", pack("<f", value))
    except OverflowError:
        return False
    return single == value and not math.ldexp(math.frexp(value)[0], _SHORT).is_integer()
