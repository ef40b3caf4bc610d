"""Durable writes: fsync, replacement of whole folders, and errors of a full disk that say how full
it is.

A rename within a directory is atomic. The renamed file must be synced before it, and the directory
after it.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isobit.util.errors import NoSpaceError, StorageError
from isobit.util.plain_files import open_plain

LARGE = 1 << 30
"""Bytes beyond which writing or checking is announced, since it takes long."""
_RESUME = "go on with --resume"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LARGE_FILE = errno.EFBIG
"""A limit on the size of a file, which no waiting lifts."""


def at_home(text: str) -> str:
    """A path with ``~`` or ``~user`` at its beginning replaced by the home directory. Raises
    RuntimeError where there is no such directory.
    """
    if not text.startswith("~"):
        return text
    made = os.path.expanduser(text)
    if made.startswith("~"):
        user = text.partition("/")[0]
        raise RuntimeError(
            f"begins with {user}, and there is no such home directory; a file in a folder of that "
            f"name is ./{text}"
        )
    return made


def lies_within(path: Path, folder: Path) -> bool:
    """Whether a path, with symbolic links resolved, is in the folder.

    In the hub's cache a snapshot's files are links to ``blobs`` beside ``snapshots``: these count
    as the folder's own.
    """
    own = folder.resolve()
    roots = [own]
    for above in (own, *own.parents):
        if above.parent.name == "snapshots":
            roots.append(above.parent.parent / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit_folder(partial: Path, target: Path) -> None:
    """Rename the finished folder ``partial`` to ``target``, which does not exist, durably."""
    sync(partial)
    partial.rename(target)
    sync(target.parent)


def replace_folder(partial: Path, target: Path) -> None:
    """Rename the finished folder ``partial`` to ``target``, which may exist and is then removed."""
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        commit_folder(partial, target)
        shutil.rmtree(old)
    else:
        commit_folder(partial, target)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A partial folder, which replaces ``target`` at the end, and is removed after an error."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for file in partial.iterdir():
            sync(file)
        replace_folder(partial, target)
    except (Exception, KeyboardInterrupt):
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
