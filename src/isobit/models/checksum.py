"""A 64-bit checksum of a tensor's bytes, on the device that has them and cheap enough for every
step of a run.

    checksum(name, bytes) = sum_c v_c sum_i u_i word_(c C + i)       modulo 2^64

over the 32-bit words of the bytes (the last one filled up with zeros), C = 2^21 of them a chunk;
u_i and v_c are random odd 64-bit numbers, v_c other ones for each name.  So

    one changed word    always changes it: an odd number has an inverse modulo 2^64
    several             or words that have changed places, leave it with a probability of about
                        2^-32
    rows                of several ranks, each with its place in the whole tensor, add up to the
                        checksum of the whole: sums of integers have no order

It finds faults and edits, not forgers: who knows the numbers can make other bytes that fit.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch.nn.functional import pad

from isobit.kernels.noise import splitmix64, splitmix64_of
from isobit.models.tensor_slices import Slice

_CHUNK = 1 << 21
"""Words; their products are 16 MiB, the most that a checksum takes beside a tensor."""
_WORD = 4
_SEED = 5


def checksum(tensors: Iterable[tuple[str, Slice]]) -> int:
    """Of rows of tensors by name, from 0 to 2^64 - 1; 0 of none.  Rows begin with a word of the
    whole tensor.
    """
    factors: list[int] = []
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: dict[torch.device, list[int]] = {}
    for name, rows in tensors:
        if rows.rows.numel():
            chunk, made = _chunk_sums(rows)
            device, seed = rows.rows.device, _seed_of(name)
            places.setdefault(device, []).extend(range(len(factors), len(factors) + len(made)))
            sums.setdefault(device, []).extend(made)
            factors += [splitmix64_of(seed, chunk + place) | 1 for place in range(len(made))]
    total = 0
    for device, made in sums.items():  # one transfer each
        numbers = zip(places[device], torch.stack(made).tolist(), strict=True)
        total += sum(factors[place] * number for place, number in numbers)
    return total % (1 << 64)


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of whole tensors."""
    return checksum((name, Slice.whole(tensor)) for name, tensor in tensors.items())


def added_up(checksums: Iterable[int]) -> int:
    """The checksum of all that several are of."""
    return sum(checksums) % (1 << 64)


@torch.no_grad()
def _chunk_sums(of: Slice) -> tuple[int, list[torch.Tensor]]:
    """The number of the first chunk, and int64 [] of each, on the tensor's device."""
    rows = of.rows.detach()
    words, row_bytes = _words(rows), rows.nbytes // len(rows) if rows.dim() else rows.nbytes
    first, rest = divmod(of.first * row_bytes, _WORD)
    assert rest == 0, (of.first, rows.shape, rows.dtype)
    inner, sums = _inner(rows.device), list[torch.Tensor]()
    chunk, place = divmod(first, _CHUNK)
    for part in _chunks(words, _CHUNK - place):
        sums.append((part * inner[place : place + len(part)]).sum())
        place = 0
    return chunk, sums


def _chunks(words: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """The first so long, or as long as it can be, and all others whole but the last."""
    head, rest = words[:first], words[first:]
    return (head, *(rest.split(_CHUNK) if len(rest) else ()))


def _words(rows: torch.Tensor) -> torch.Tensor:
    """int32 [W]."""
    data = rows.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(data) % _WORD
    if missing:
        data = pad(data, (0, missing))
    elif data.data_ptr() % _WORD:  # mapped from a file, behind numbers of fewer bytes
        data = data.clone()
    return data.view(torch.int32)


@cache
def _inner(device: torch.device) -> torch.Tensor:
    indices = torch.arange(_CHUNK, device=device)
    return splitmix64(torch.full_like(indices, _SEED), indices) | 1


@cache
def _seed_of(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
