"""Noise keys, AdamW's factors and the checksum, which have one definition for every back end.

**Sampling noise** is counter-based, without state.  A sample has a 64-bit key, a hash of (run seed,
prompt, visit, sample).  The noise of vocabulary entry v at position p is output v + 1 of the
splitmix64 generator whose seed is output p + 1 of the one seeded with the key.  Output i is
mix(seed + i * 0x9E3779B97F4A7C15), in 64 bits, so the [N, V] block of noise is a dozen elementwise
integer operations, and a sample's tokens depend neither on scheduling nor on other samples.  The
integers are in int64 tensors: multiplication and addition wrap, and an arithmetic shift followed by
a mask is a logical one.

**The checksum** of bytes is 64 bits, the same on every device and fast enough for every step:

    checksum = sum_c v_c sum_i u_i word_(c C + i)       modulo 2^64

over the 32-bit words of a tensor's bytes (signed; the last padded with zeros), C = 2^21 of them a
chunk; u_i and v_c are random odd 64-bit numbers, u_i the same for all tensors, v_c those of the
tensor's seed.  One changed word always changes it, since an odd number has an inverse modulo 2^64;
several changed or exchanged words leave it with a probability of about 2^-32.  Rows of several
ranks, each with its place in the whole tensor, add up to the checksum of the whole.  A word may be
divided between ranks: each fills it up with zeros, and a word is the sum of such words, since only
the one with its highest byte can be negative.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def sample_key(seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """The key of a sample, a signed 64-bit integer, the same on every machine."""
    name = f"{seed}/{visit}/{sample}/{prompt_id}"  # the id is last, since it may hold a slash
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )


def splitmix64(seeds: Tensor, indices: Tensor) -> Tensor:
    """Outputs ``indices + 1`` of the generators with ``seeds``: int64, broadcast together."""
    bits = seeds + (indices + 1) * _GOLDEN
    bits ^= logical_shift_right(bits, 30)
    bits *= _MULTIPLIER_1
    bits ^= logical_shift_right(bits, 27)
    bits *= _MULTIPLIER_2
    bits ^= logical_shift_right(bits, 31)
    return bits


def splitmix64_of(seed: int, index: int) -> int:
    """One output of ``splitmix64`` for signed 64-bit integers, without tensors."""
    bits = (seed + (index + 1) * _GOLDEN) & _MASK
    bits = (bits ^ bits >> 30) * _MULTIPLIER_1 & _MASK
    bits = (bits ^ bits >> 27) * _MULTIPLIER_2 & _MASK
    return _signed(bits ^ bits >> 31)


def logical_shift_right(bits: Tensor, places: int) -> Tensor:
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


GROUP = 128
FIRST, SECOND = torch.float8_e4m3fn, torch.uint8  # formats of the codes of m and of sqrt(v)


def num_groups(elements: int) -> int:
    """The scales of so many elements; the last group may be short."""
    return -(-elements // GROUP)


@dataclass(frozen=True, slots=True)
class AdamWFactors:
    """Factors that all elements of a tensor share; rounded to FP32 where they are used."""

    clip: float
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float  # 1 - beta2
    root: float  # 1 / sqrt(1 - beta2^t)
    epsilon: float
    size: float  # rate / (1 - beta1^t)
    decay: float  # rate * weight_decay

    @classmethod
    def of(
        cls,
        rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        step: int,
        clip: float,
    ) -> "AdamWFactors":
        """The factors of step 1, 2, .."""
        assert step >= 1
        root = 1 / math.sqrt(1 - beta2**step)
        return cls(
            clip, beta1, 1 - beta1, beta2, 1 - beta2, root, epsilon, rate / (1 - beta1**step),
            rate * weight_decay,
        )  # fmt: skip


def noise_key(seed: int, step: int, tensor: int) -> int:
    """The seed of one tensor's noise in one step: a signed 64-bit integer."""
    return splitmix64_of(splitmix64_of(seed, step), tensor)


def check_moments(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    key: int | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    first_element: int,
) -> None:
    """Assert that the tensors of an update fit together: one shape, and the moments' formats that a
    key and scales belong to; and that a slice begins at a group of 8-bit moments.
    """
    assert first_element % GROUP == 0
    for x in (master, grad, exp_avg, exp_avg_sq):
        assert x.is_contiguous()
        assert (x.shape, x.device) == (master.shape, master.device)
    assert master.dtype == grad.dtype == torch.float32
    wide = torch.float32 if key is None else torch.bfloat16
    assert key is not None or scales is None
    assert (exp_avg.dtype, exp_avg_sq.dtype) == ((FIRST, SECOND) if scales else (wide, wide))


WORD = 4
CHUNK = 1 << 21  # words
SEED = 5
"""The seed of the generator of u_i (output i + 1, made odd); the tensor's seed is that of v_c."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor, of which a checksum is computed."""

    tensor: torch.Tensor  # of any shape and dtype, not empty
    first_byte: int  # where these begin in the whole tensor, at any byte
    seed: int  # of the whole tensor's v_c, a signed 64-bit integer
