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

AdamW in numbers: what the elements of a tensor have in common in one update, the formats of the
moments, and what their rounding is keyed by.  ``isobit.kernels.spec.optimiser`` has the equation.

A 64-bit checksum of bytes, the same on every device and cheap enough for every step of a run:

    checksum = sum_c v_c sum_i u_i word_(c C + i)       modulo 2^64

over the 32-bit words of a tensor's bytes (signed; the last one filled up with zeros), C = 2^21 of
them a chunk; u_i and v_c are random odd 64-bit numbers (``isobit.kernels.noise``), u_i the same for
all tensors, v_c those of the tensor's seed.  So

    one changed word    always changes it: an odd number has an inverse modulo 2^64
    several             or words that have changed places, leave it with a probability of about
                        2^-32
    rows                of several ranks, each with its place in the whole tensor, add up to the
                        checksum of the whole: sums of integers have no order

``isobit.kernels.spec.optimiser`` computes it on a host, ``isobit.kernels.hopper.checksum``
on a GPU.
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


GROUP = 128
FIRST, SECOND = torch.float8_e4m3fn, torch.uint8
"""Formats of the codes of m and of sqrt(v)."""


def num_groups(elements: int) -> int:
    """The scales of so many elements; the last group may be short."""
    return -(-elements // GROUP)


@dataclass(frozen=True, slots=True)
class AdamWFactors:
    """What the elements of a tensor have in common; every figure is rounded to FP32 where it is
    used.
    """

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
            clip,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            root,
            epsilon,
            rate / (1 - beta1**step),
            rate * weight_decay,
        )


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
    """Assert that the tensors of an update go together: one shape, and the formats of the moments
    that a key and scales belong to; and that a slice begins where a group of 8-bit moments does.
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
CHUNK = 1 << 21
"""Words."""
SEED = 5
"""u_i is output i + 1 of the splitmix64 generator with this seed, made odd; v_c output c + 1 of the
one with the tensor's.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor, of which a checksum is taken."""

    tensor: torch.Tensor
    """Of any shape and dtype, with an element at least."""
    first_word: int
    """In the whole tensor, where these begin."""
    seed: int
    """Of the whole tensor's v_c, a signed 64-bit integer."""
