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

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


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
    bits ^= _shift_right(bits, 30)
    bits *= _MULTIPLIER_1
    bits ^= _shift_right(bits, 27)
    bits *= _MULTIPLIER_2
    bits ^= _shift_right(bits, 31)
    return bits


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """The logical right shift: zeros come in from the left."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def uniforms(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] uniforms in the open interval (0, 1), for int64 keys [N] and positions [N].

    They are the odd multiples of 2^-53: neither 0 nor 1 occurs, so both logarithms of the Gumbel
    transform are finite.
    """
    seeds = splitmix64(keys, positions)
    entries = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = splitmix64(seeds.unsqueeze(1), entries.unsqueeze(0))
    return _shift_right(bits, 11).bitwise_or_(1).double().mul_(2.0**-53)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] standard Gumbel noise: argmax(log-probability + noise) is a draw from the
    distribution.
    """
    return uniforms(keys, positions, vocab_size).log_().neg_().log_().neg_()
