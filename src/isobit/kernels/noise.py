"""Sampling noise that depends on nothing but whose token it is: counter-based, no generator, no
state.

A sample is named by a 64-bit key, a stable hash of (run seed, prompt, visit, sample).  The noise of
vocabulary entry v at position p of that sample is output v + 1 of the splitmix64 generator whose
seed is output p + 1 of the splitmix64 generator seeded with the key.  Output i of splitmix64 is a
pure function of seed and i,

    mix(seed + i * 0x9E3779B97F4A7C15)        (all in 64 bits, wrapping)

so a whole [N, V] block of noise is a dozen elementwise integer operations, and the tokens of a
sample do not depend on the order in which requests were scheduled, on its neighbours, or on being
preempted.

The integers live in int64 tensors: multiplication and addition wrap, and an arithmetic shift
followed by a mask is a logical one.
"""

import hashlib

from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def sample_key(seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """The key of one sample, a signed 64-bit integer: the same in every process and on every
    machine.
    """
    # the id comes last: it may hold a slash, the numbers cannot
    name = f"{seed}/{visit}/{sample}/{prompt_id}"
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )


def splitmix64(seeds: Tensor, indices: Tensor) -> Tensor:
    """Outputs number ``indices + 1`` of the generators seeded with ``seeds``: int64 tensors that
    broadcast, int64 bits out.
    """
    bits = seeds + (indices + 1) * _GOLDEN
    bits ^= logical_shift_right(bits, 30)
    bits *= _MULTIPLIER_1
    bits ^= logical_shift_right(bits, 27)
    bits *= _MULTIPLIER_2
    bits ^= logical_shift_right(bits, 31)
    return bits


def splitmix64_of(seed: int, index: int) -> int:
    """One output of ``splitmix64``, of signed 64-bit integers, without tensors: a host that has a
    key to make for every master must not keep a GPU waiting.
    """
    bits = (seed + (index + 1) * _GOLDEN) & _MASK
    bits = (bits ^ bits >> 30) * _MULTIPLIER_1 & _MASK
    bits = (bits ^ bits >> 27) * _MULTIPLIER_2 & _MASK
    return _signed(bits ^ bits >> 31)


def logical_shift_right(bits: Tensor, places: int) -> Tensor:
    """The logical right shift: zeros come in from the left."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)
