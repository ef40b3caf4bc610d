"""A 64-bit checksum of a tensor's bytes, made where it lies, in which every byte has its place:

    checksum = sum_i word_i w_i  modulo 2^64,    w_i = piece_(i / P) * word_(i mod P), all odd

``word_i`` are the bytes as 64-bit words, the last filled up with zeros; the weights are outputs of
splitmix64 (``isobit.kernels.noise``), made odd.  An odd weight takes no difference to 0, so a
single word that differs is always seen; words that have changed places, or several that differ, are
missed with a probability of about 2^-63 times the power of two that their differences share.  Sums
of integers have no order: the checksum is the same on any device.
"""

from functools import cache

import torch

from isobit.kernels.noise import splitmix64, splitmix64_of

_PIECE = 1 << 20
"""P: words that are weighed at a time, so that no temporary is large."""
_WORD_SEED, _PIECE_SEED = 11, 12


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor of any format -> int64 [], on its device; nothing is waited for."""
    flat = tensor.view(-1).view(torch.uint8)
    whole = flat.numel() - flat.numel() % 8
    words = flat[:whole].view(torch.int64)
    if whole < flat.numel():
        last = flat.new_zeros(8)
        last[: flat.numel() - whole] = flat[whole:]
        words = torch.cat((words, last.view(torch.int64)))
    weights = _weights(tensor.device)
    made = flat.new_zeros((), dtype=torch.int64)
    for number, piece in enumerate(words.split(_PIECE)):
        made += (piece * weights[: len(piece)]).sum() * _of_piece(number)
    return made


def combined(checksums: list[torch.Tensor]) -> int:
    """One of several tensors, in which each has its place; a signed 64-bit integer."""
    return int(checksum(torch.stack(checksums)))


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """[P], int64."""
    places = torch.arange(_PIECE, device=device)
    return splitmix64(torch.full_like(places, _WORD_SEED), places) | 1


def _of_piece(number: int) -> int:
    return splitmix64_of(_PIECE_SEED, number) | 1
