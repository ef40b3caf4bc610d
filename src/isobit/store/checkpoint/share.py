"""The part of a checkpoint's tensors that a rank owns: rows of masters, and AdamW's state of them.

MASTER                      rows that ``isobit.parallel.ownership`` gives the rank
MASTER.exp_avg, exp_avg_sq  the same rows
MASTER.*_scale              the groups of 128 elements of these rows: whole ones, as rows are cut
                            where an element's number is a multiple of 128
MASTER.step                 the same number on all ranks; rank 0 writes it
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from isobit.kernels.adamw import num_groups
from isobit.models.tensor_file import TensorFile
from isobit.models.tensor_slices import Slice
from isobit.parallel.ownership import Ownership

_STEP, _SCALE = "step", "_scale"


@dataclass(frozen=True, slots=True)
class Share:
    """Of one rank."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole masters."""
    ownership: Ownership
    rank: int

    def masters(self, own: Mapping[str, Tensor]) -> dict[str, Slice]:
        """The rank's masters, with their places in the whole ones."""
        return {
            name: Slice(self.shapes[name], self.ownership.rows(name, self.rank).start, rows)
            for name, rows in own.items()
        }

    def moments(self, own: Mapping[str, Tensor]) -> dict[str, Slice]:
        """The rank's moments (``Trainer.moments``), with their places in the whole ones."""
        return {key: self._moment(key, tensor) for key, tensor in own.items()}

    def own_masters(self, file: TensorFile) -> "OwnRows":
        """The rank's masters, of a file of whole ones."""
        return OwnRows(file, {name: self.ownership.rows(name, self.rank) for name in file})

    def own_moments(self, file: TensorFile) -> "OwnRows":
        """The rank's moments, of a file of whole ones."""
        return OwnRows(file, {key: self._rows(key) for key in file})

    def _moment(self, key: str, own: Tensor) -> Slice:
        rows = self._rows(key)
        if rows is None:
            return Slice.whole(own) if self.rank == 0 else Slice.none(own)
        return Slice(self._shape(key), rows.start, own)

    def _shape(self, key: str) -> tuple[int, ...]:
        """Of a whole moment that has rows."""
        name, _, kind = key.rpartition(".")
        shape = self.shapes[name]
        return (num_groups(prod(shape)),) if kind.endswith(_SCALE) else shape

    def _rows(self, key: str) -> slice | None:
        """The rank's rows of a moment; None of a number that all have."""
        name, _, kind = key.rpartition(".")
        if kind == _STEP:
            return None
        rows = self.ownership.rows(name, self.rank)
        if not kind.endswith(_SCALE):
            return rows
        width = prod(self.shapes[name][1:])
        return slice(num_groups(rows.start * width), num_groups(rows.stop * width))


class OwnRows(Mapping[str, Tensor]):
    """A rank's rows of the tensors of a file, mapped: no other row is read."""

    def __init__(self, file: TensorFile, rows: Mapping[str, slice | None]) -> None:
        """``rows`` of each tensor; None for all."""
        self._file, self._rows = file, rows

    def __getitem__(self, name: str) -> Tensor:
        rows, whole = self._rows[name], self._file[name]
        return whole if rows is None else whole[rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)
