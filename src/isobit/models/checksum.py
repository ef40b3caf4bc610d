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

A model has many small tensors, and a GPU takes longer to be asked than to add these up: there their
words are put end to end, a chunk at a time, and the sum of each is a difference of the running one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import accumulate

import torch
from torch.nn.functional import pad

from isobit.kernels.noise import splitmix64, splitmix64_of
from isobit.models.tensor_slices import Slice

_CHUNK = 1 << 21
"""Words; their products are 16 MiB, and a checksum takes three times that beside a tensor."""
_WORD = 4
_SEED = 5


def checksum(tensors: Iterable[tuple[str, Slice]]) -> int:
    """Of rows of tensors by name, from 0 to 2^64 - 1; 0 of none.  Rows begin with a word of the
    whole tensor.
    """
    sums: dict[torch.device, _Sums] = {}
    for name, rows in tensors:
        if rows.rows.numel():
            device = rows.rows.device
            sums.setdefault(device, _Sums(device)).add(_seed_of(name), rows)
    return added_up(one.total() for one in sums.values())


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of whole tensors."""
    return checksum((name, Slice.whole(tensor)) for name, tensor in tensors.items())


def added_up(checksums: Iterable[int]) -> int:
    """The checksum of all that several are of."""
    return sum(checksums) % (1 << 64)


class _Sums:
    """On one device: v_c times the sum over chunk c, of every chunk of every tensor."""

    def __init__(self, device: torch.device) -> None:
        self._inner, self._at_once = _inner(device), _words_at_once(device)
        self._outer: list[int] = []
        """v_c of each."""
        self._made: list[torch.Tensor] = []
        """int64 [P] each, in the same order."""
        self._words: list[torch.Tensor] = []
        """Of chunks whose sums are not made yet, together no more than a whole one."""
        self._factors: list[torch.Tensor] = []
        self._size = 0

    def add(self, seed: int, of: Slice) -> None:
        """The chunks of a tensor's rows."""
        rows = of.rows.detach()
        row_bytes = rows.nbytes // len(rows) if rows.dim() else rows.nbytes
        first, rest = divmod(of.first * row_bytes, _WORD)
        assert rest == 0, (of.first, rows.shape, rows.dtype)
        chunk, place = divmod(first, _CHUNK)
        words = _words(rows)
        while len(words):
            part, words = words[: _CHUNK - place], words[_CHUNK - place :]
            self._add_chunk(part, self._inner[place : place + len(part)])
            self._outer.append(splitmix64_of(seed, chunk) | 1)
            chunk, place = chunk + 1, 0

    def total(self) -> int:
        """Of all that was added; waits for the device, once."""
        self._flush()
        numbers = torch.cat(self._made).tolist()
        return sum(v * number for v, number in zip(self._outer, numbers, strict=True))

    def _add_chunk(self, words: torch.Tensor, factors: torch.Tensor) -> None:
        if self._size + len(words) > self._at_once:
            self._flush()
        self._words.append(words)
        self._factors.append(factors)
        self._size += len(words)

    def _flush(self) -> None:
        if len(self._words) == 1:
            self._made.append((self._words[0] * self._factors[0]).sum().view(1))
        elif self._words:
            products = torch.cat(self._words) * torch.cat(self._factors)
            ends = torch.tensor([*accumulate(map(len, self._words))], device=products.device)
            sums = products.cumsum(0)[ends - 1]
            self._made.append(sums.diff(prepend=sums.new_zeros(1)))
        self._words, self._factors, self._size = [], [], 0


def _words_at_once(device: torch.device) -> int:
    return _CHUNK if device.type == "cuda" else 0


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
