"""Paths, digests of files, and durable replacement of whole folders.

A rename within a directory is atomic. The renamed file must be synced before it, and the directory
after it.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobit.util.plain_files import open_plain

LARGE = 1 << 30
"""Bytes beyond which writing or checking is announced, since it takes long."""


def at_home(text: str) -> str:
    """A path with ``~`` or ``~user`` at its beginning replaced by the home directory. Raises
    RuntimeError where there is no such directory.
    """
    if not text.startswith("~"):
        return text
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = text.partition("/")[0]
        raise RuntimeError(
            f"begins with {user}, and there is no such home directory; a file in a folder of that "
            f"name is ./{text}"
        )
    return path


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
