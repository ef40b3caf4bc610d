"""64-bit names: of a row's bits, and of the tokens up to a position.

    checksum(row)   = sum_j bits_j w_j         modulo 2^64, with random 64-bit weights w_j; bits_j
                                               are 32 at once where a row has a multiple of these
    key(t_0 .. t_p) = sum_i (t_i + 1) w_i      a running sum along the sequence

Sums of integers have no order, so both are the same in any batch, on any device.  Two rows that
differ have one checksum with a probability of about 2^-33 at most (2^-64 times the power of two
that all differences share).
"""

from functools import cache

import torch

from isobit.kernels.noise import splitmix64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ROW_SEED, _TOKEN_SEED, _SCALE_SEED = 1, 2, 3


def row_checksums(values: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """[T, ...] of any dtype, and what scales come with it -> int64 [T], on the CPU."""
    checksums = _weighted_bits(values, _ROW_SEED)
    return checksums if scales is None else checksums + _weighted_bits(scales, _SCALE_SEED)


def token_keys(
    token_ids: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """What each token of a ragged batch goes by: its whole prefix, itself included.

    token_ids and positions int64 [T] of pieces laid end to end, counts int64 [B] of each piece,
    before int64 [B]: the key of the token before the piece, 0 at the start of a sequence -> int64
    [T].
    """
    terms = (token_ids + 1) * _weights(positions, _TOKEN_SEED)
    running = terms.cumsum(0)
    starts = counts.cumsum(0) - counts
    return running + (before + terms[starts] - running[starts]).repeat_interleave(counts)


def _weighted_bits(x: torch.Tensor, seed: int) -> torch.Tensor:
    bits = x.view(_INTEGERS[x.element_size()]).unsqueeze(-1).flatten(1)
    if bits.shape[1] * bits.element_size() % 4 == 0:
        bits = bits.contiguous().view(torch.int32)
    bits = bits.to(torch.int64)
    return bits.mul_(_row_weights(bits.shape[1], seed, bits.device)).sum(1).cpu()


@cache
def _row_weights(width: int, seed: int, device: torch.device) -> torch.Tensor:
    return _weights(torch.arange(width, device=device), seed)


def _weights(indices: torch.Tensor, seed: int) -> torch.Tensor:
    return splitmix64(torch.full_like(indices, seed), indices)
