"""Sampling noise as tensors: uniforms and Gumbel noise of every vocabulary entry.

The noise of vocabulary entry v at position p of a sample is output v + 1 of the splitmix64
generator whose seed is output p + 1 of the one seeded with the sample's key
(``isobit.kernels.noise``): a whole [N, V] block is a dozen elementwise integer operations.
"""

import torch
from torch import Tensor

from isobit.kernels.noise import logical_shift_right, splitmix64


def uniforms(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] uniforms in the open interval (0, 1), for int64 keys [N] and positions [N].

    They are the odd multiples of 2^-53: neither 0 nor 1 occurs, so both logarithms of the Gumbel
    transform are finite.
    """
    seeds = splitmix64(keys, positions)
    entries = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = splitmix64(seeds.unsqueeze(1), entries.unsqueeze(0))
    return logical_shift_right(bits, 11).bitwise_or_(1).double().mul_(2.0**-53)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] standard Gumbel noise: argmax(log-probability + noise) is a draw from the
    distribution.
    """
    return uniforms(keys, positions, vocab_size).log_().neg_().log_().neg_()
