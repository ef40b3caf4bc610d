"""A safetensors file written by several processes side by side, each its own rows of the tensors:
the header follows from the whole shapes, and from it where every row lies.

The bytes are those of ``isobit.models.tensor_file.write_tensors``, whoever writes which rows.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from isobit.models.tensor_file import FilePlan, bytes_of

_AT_ONCE = 1 << 30
"""Bytes of a write; Linux takes less than 2 GiB."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a tensor that lies on several ranks."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    """Its row that is the first of these."""
    rows: torch.Tensor
    """[R, ...], R from 0, on any device."""

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Slice":
        """All rows."""
        return cls(tuple(tensor.shape), 0, tensor)

    @classmethod
    def none(cls, tensor: torch.Tensor) -> "Slice":
        """No row of a tensor that another rank writes."""
        return cls(tuple(tensor.shape), 0, tensor.reshape(-1)[:0])

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.rows.element_size()


def plan_slices(slices: Mapping[str, Slice]) -> FilePlan:
    """The file of the whole tensors."""
    return FilePlan.of(
        {
            name: torch.empty(one.shape, dtype=one.rows.dtype, device="meta")
            for name, one in slices.items()
        }
    )


def create_file(path: Path, plan: FilePlan) -> None:
    """Write the header, and give the file its size: from now on any process may write its rows."""
    with path.open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.size)


def write_slices(
    path: Path, plan: FilePlan, slices: Mapping[str, Slice], beat: Callable[[], None]
) -> None:
    """Write these rows into the file that has been created; on the disk when this returns.
    ``beat`` is called after each tensor.
    """
    with path.open("r+b") as file:
        for name, begin in plan.begins.items():
            one = slices[name]
            if one.rows.numel():
                row = prod(one.shape[1:]) * one.rows.element_size()
                _write_at(file.fileno(), bytes_of(one.rows), begin + one.first * row)
                beat()
        os.fsync(file.fileno())


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:_AT_ONCE], place)
        data, place = data[written:], place + written
