"""Training rows in a temporary file instead of in memory."""

import errno
import os
import pickle
import tempfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar, overload

from isobit.util.errors import DataError
from isobit.util.terminal import gib

Item = TypeVar("Item")
Made = TypeVar("Made")

ROWS_AT_ONCE = 1024
"""Rows that are tokenised at a time on their way to a spool."""


def in_chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, ROWS_AT_ONCE)):
        yield chunk


class Mapped(Sequence[Made], Generic[Item, Made]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, items: Sequence[Item], make: Callable[[Item], Made]) -> None:
        self._items = items
        self._make = make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Made: ...
    @overload
    def __getitem__(self, index: slice) -> list[Made]: ...
    def __getitem__(self, index: int | slice) -> Made | list[Made]:
        if isinstance(index, slice):
            return [self._make(item) for item in self._items[index]]
        return self._make(self._items[index])


class Spool(Mapping[str, Item]):
    """Items by id, in a temporary file instead of in memory. It has no name, so that it is gone
    with the process, however that ends. In memory are two numbers for each item.

    The ids are ``NAME/N`` with one name and rising numbers.
    """

    def __init__(self, items: Iterable[Item], id_of: Callable[[Item], str]) -> None:
        """Raises DataError if the disk is full, and what the iteration raises."""
        self._file = tempfile.TemporaryFile(prefix="isobit-")  # noqa: SIM115
        self._ends = array("Q", [0])
        self._numbers = array("Q")
        self._name = ""
        for item in items:
            self._name, _, number = id_of(item).rpartition("/")
            self._ends.append(self._ends[-1] + self._write(item))
            self._numbers.append(int(number))
        self._file.flush()

    def _write(self, item: Item) -> int:
        content = zlib.compress(pickle.dumps(item, pickle.HIGHEST_PROTOCOL), level=1)
        try:
            return self._file.write(content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"the disk of {tempfile.gettempdir()} is full after {len(self):,} training rows "
                f"({gib(self._ends[-1])}), which data.streaming keeps there; set the environment "
                "variable TMPDIR to a folder with more space"
            ) from error

    @property
    def items_in_order(self) -> Sequence[Item]:
        return Mapped(range(len(self)), self._at)

    def describe(self) -> str:
        """``streamed from 1.20 GiB in /tmp``."""
        return f"streamed from {gib(self._ends[-1])} in {tempfile.gettempdir()}"

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return (f"{self._name}/{number}" for number in self._numbers)

    def __getitem__(self, name: str) -> Item:
        before, _, number = name.rpartition("/")
        if before == self._name and number.isdecimal():
            place = bisect_left(self._numbers, int(number))
            if place < len(self) and self._numbers[place] == int(number):
                return self._at(place)
        raise KeyError(name)

    def _at(self, place: int) -> Item:
        begin, end = self._ends[place], self._ends[place + 1]
        content = os.pread(self._file.fileno(), end - begin, begin)
        return pickle.loads(zlib.decompress(content))  # noqa: S301  # this process wrote it
