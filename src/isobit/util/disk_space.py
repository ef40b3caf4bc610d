"""The space on a disk, and writes whose errors say how full it is."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isobit.util.errors import NoSpaceError, StorageError

_RESUME = "go on with --resume"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LARGE_FILE = errno.EFBIG
"""A limit on the size of a file, which no waiting lifts."""


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(
        next(place for place in (path, *path.absolute().parents) if place.exists())
    ).free


def check_free(path: Path, needed: int, what: str) -> None:
    free = free_bytes(path)
    if needed > free:
        raise NoSpaceError(
            f"{what} needs {needed:,} bytes, but {free:,} are free in {path}; free some space"
        )


@contextmanager
def disk_errors(
    path: Path, what: str, needed: int | None = None, again: str = _RESUME
) -> Iterator[None]:
    """Turn a failed write below ``path`` into a StorageError with what was being written, the bytes
    needed, those free, and what to do ``again``; of a full disk or quota into a NoSpaceError.
    """
    try:
        yield
    except BrokenPipeError:  # of the console, not of the disk
        raise
    except OSError as error:
        need = f"; needed: {needed:,} bytes" if needed is not None else ""
        is_full = error.errno in _FULL
        is_room = is_full or error.errno == _LARGE_FILE
        remedy = "free some space" if is_room else "make it writable"
        advice = f"{remedy}, then {again}"
        reason = error.strerror or str(error)
        free = "unknown"
        with suppress(OSError):
            free = f"{free_bytes(path):,} bytes"
        raise (NoSpaceError if is_full else StorageError)(
            f"{what} could not be written in {path}: {reason}{need}, free: {free}; {advice}"
        ) from error


class LineFile:
    """A file to which whole lines are appended, unbuffered; a line that fails is removed again."""

    def __init__(self, path: Path, again: str = _RESUME) -> None:
        """Append to a file; ``again`` is what to do after an error. Raises OSError."""
        self._path, self._again = path, again
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes, lasting: bool = False) -> None:
        """Append a line, and with ``lasting`` sync it. Raises StorageError."""
        what = f"a line of {self._path.name}"
        with disk_errors(self._path.parent, what, len(line), self._again):
            size = self._file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
                if lasting:
                    os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self.cut(size)
                raise

    def cut(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()
