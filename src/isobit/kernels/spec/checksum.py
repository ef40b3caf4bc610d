"""The checksum of bytes (``isobit.kernels.checksum``), a chunk at a time."""

from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.functional import pad

from isobit.kernels.checksum import CHUNK, SEED, WORD, Rows
from isobit.kernels.noise import splitmix64, splitmix64_of


def checksum(rows: Sequence[Rows]) -> int:
    """See ``Backend``.  Beside a tensor it takes the products of a chunk, 16 MiB."""
    return sum(map(_of, rows)) % (1 << 64)


def _of(rows: Rows) -> int:
    chunk, place = divmod(rows.first_word, CHUNK)
    words, total = _words(rows.tensor), 0
    while len(words):
        part, words = words[: CHUNK - place], words[CHUNK - place :]
        products = part * _inner(CHUNK)[place : place + len(part)]
        total += (splitmix64_of(rows.seed, chunk) | 1) * int(products.sum())
        chunk, place = chunk + 1, 0
    return total


def _words(rows: torch.Tensor) -> torch.Tensor:
    """int32 [W]."""
    data = rows.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(data) % WORD
    if missing:
        data = pad(data, (0, missing))
    elif data.data_ptr() % WORD:  # mapped from a file, behind numbers of fewer bytes
        data = data.clone()
    return data.view(torch.int32)


@cache
def _inner(count: int) -> torch.Tensor:
    """u_i, int64."""
    indices = torch.arange(count)
    return splitmix64(torch.full_like(indices, SEED), indices) | 1
