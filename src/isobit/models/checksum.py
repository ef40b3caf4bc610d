"""A 64-bit checksum of a tensor's bytes, on the device that has them and cheap enough for every
step of a run.

    checksum(name, bytes) = sum_c v_c sum_i u_i word_(c C + i)       modulo 2^64

over the 32-bit words of the bytes (the last one filled up with zeros), C = 2^20 of them a chunk;
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

from isobit.kernels.noise import splitmix64
from isobit.models.tensor_slices import Slice

_CHUNK = 1 << 20
"""Words; their products are 8 MiB, the most that a checksum takes beside a tensor."""
_WORD = 4
_SEED = 5


def checksum(tensors: Iterable[tuple[str, Slice]]) -> int:
    """Of rows of tensors by name, from 0 to 2^64 - 1; 0 of none.  Rows begin with a word of the
    whole tensor.
    """
    sums = [_of_rows(name, rows) for name, rows in tensors if rows.rows.numel()]
    return added_up([int(one) for one in _on_host(sums)])


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of whole tensors."""
    return checksum((name, Slice.whole(tensor)) for name, tensor in tensors.items())


def added_up(checksums: Iterable[int]) -> int:
    """The checksum of all that several are of."""
    return sum(checksums) % (1 << 64)


def _on_host(sums: list[torch.Tensor]) -> list[int]:
    """One transfer for each device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for one in sums:
        found.setdefault(one.device, []).append(one)
    return [number for of_device in found.values() for number in torch.stack(of_device).tolist()]


@torch.no_grad()
def _of_rows(name: str, slice_: Slice) -> torch.Tensor:
    """int64 [], on the tensor's device."""
    rows = slice_.rows.detach()
    words, row_bytes = _words(rows), rows.nbytes // len(rows) if rows.dim() else rows.nbytes
    first, rest = divmod(slice_.first * row_bytes, _WORD)
    assert rest == 0, (name, slice_.first, rows.shape, rows.dtype)
    inner, sums = _inner(rows.device), list[torch.Tensor]()
    chunk, place = divmod(first, _CHUNK)
    for part in _chunks(words, _CHUNK - place):
        sums.append((part * inner[place : place + len(part)]).sum())
        place = 0
    outer = _odd(torch.arange(chunk, chunk + len(sums), device=rows.device), _seed_of(name))
    return (torch.stack(sums) * outer).sum()


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
    return _odd(torch.arange(_CHUNK, device=device), _SEED)


def _odd(indices: torch.Tensor, seed: int) -> torch.Tensor:
    return splitmix64(torch.full_like(indices, seed), indices) | 1


@cache
def _seed_of(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
