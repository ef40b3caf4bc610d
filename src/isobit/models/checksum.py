"""Checksums of named tensors (``isobit.kernels.noise``), computed on the devices that hold them.

The name seeds v_c of its tensor, so it is part of the checksum. Checksums detect faults and edits,
not deliberate forgery.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.noise import WORD, Rows
from isobit.models.safetensors import Slice


def checksum(tensors: Iterable[tuple[str, Slice]]) -> int:
    """The checksum of rows of named tensors, from 0 to 2^64 - 1 and 0 for none. Rows must begin at
    a word of the whole tensor. Waits for each device once.
    """
    by_device: dict[torch.device, list[Rows]] = {}
    for name, rows in tensors:
        if rows.rows.numel():
            by_device.setdefault(rows.rows.device, []).append(_placed(name, rows))
    return added_up(backend_of(device).checksum(rows) for device, rows in by_device.items())


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return checksum((name, Slice.whole(tensor)) for name, tensor in tensors.items())


def added_up(checksums: Iterable[int]) -> int:
    """The checksum of all rows together, from the checksums of disjoint sets of rows."""
    return sum(checksums) % (1 << 64)


def _placed(name: str, of: Slice) -> Rows:
    rows = of.rows.detach()
    row_bytes = rows.nbytes // len(rows) if rows.dim() else rows.nbytes
    first, rest = divmod(of.first * row_bytes, WORD)
    assert rest == 0, (of.first, rows.shape, rows.dtype)
    return Rows(rows, first, _seed_of(name))


@cache
def _seed_of(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
