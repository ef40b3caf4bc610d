"""The runs in and below folders."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from isobit.store.directory import RunDirectory

MOST_FOLDERS = 5000
"""Folders that are searched for runs."""
DEPTH = 4
"""Levels of folders below the one that was named."""


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """The runs in and below folders, by a name that no two share: the path below the folder.
    Folders that cannot be read are passed over.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for path in _runs_below(root):
            name = path.relative_to(root).as_posix() if path != root else root.resolve().name
            if len(roots) > 1 and path != root:
                name = f"{root.resolve().name}/{name}"
            others = (f"{name} ({number})" for number in count(2))
            found[next(one for one in chain([name], others) if one not in found)] = path
    return found


def _runs_below(root: Path) -> Iterator[Path]:
    waiting, looked = [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS:
        (folder, depth), looked = waiting.pop(), looked + 1
        directory = RunDirectory(folder)
        if directory.manifest.is_file() or directory.metrics.is_file():
            yield folder
        elif depth < DEPTH:
            with suppress(OSError):
                below = [Path(one.path) for one in os.scandir(folder) if _is_folder(one)]
                waiting += [(one, depth + 1) for one in sorted(below, reverse=True)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
