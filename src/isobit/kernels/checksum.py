"""A 64-bit checksum of bytes, the same on every device and cheap enough for every step of a run:

    checksum = sum_c v_c sum_i u_i word_(c C + i)       modulo 2^64

over the 32-bit words of a tensor's bytes (signed; the last one filled up with zeros), C = 2^21 of
them a chunk; u_i and v_c are random odd 64-bit numbers (``isobit.kernels.noise``), u_i the same for
all tensors, v_c those of the tensor's seed.  So

    one changed word    always changes it: an odd number has an inverse modulo 2^64
    several             or words that have changed places, leave it with a probability of about
                        2^-32
    rows                of several ranks, each with its place in the whole tensor, add up to the
                        checksum of the whole: sums of integers have no order

``isobit.kernels.spec.checksum`` computes it on a host, ``isobit.kernels.hopper.checksum`` on a GPU.
"""

from dataclasses import dataclass

import torch

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
