"""The files of a run that only grow: the ``.jsonl`` files and TensorBoard's events.

A checkpoint records the size of each.  What follows belongs to steps that a resumed run repeats,
and is cut.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobit.store.directory import RunDirectory
from isobit.util.errors import CheckpointError
from isobit.util.files import sync
from isobit.util.plain_files import open_plain, read_plain
from isobit.util.strict_json import json_line, parsed_line

EVENTS_SUFFIX = ".isobit"
"""Suffix of the event files that a run writes; other files in their folder are left alone."""
Positions = Mapping[str, int]  # bytes by path relative to the run's directory


def positions(directory: RunDirectory) -> dict[str, int]:
    """The sizes of the files now, once they are flushed."""
    return {
        str(path.relative_to(directory.root)): path.stat().st_size for path in _journals(directory)
    }


def sync_journals(directory: RunDirectory) -> None:
    """Sync the files, before a checkpoint that records their sizes."""
    for path in _journals(directory):
        sync(path)
    for folder in (directory.tensorboard, directory.root):
        if folder.is_dir():
            sync(folder)


def check_positions(directory: RunDirectory, recorded: Positions) -> None:
    """Raise CheckpointError for a file that is missing or shorter than a checkpoint recorded."""
    for name, size in recorded.items():
        path = directory.root / name
        try:
            present = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, which had {size:,} bytes then") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if present < size:
            raise CheckpointError(
                f"{path} has {present:,} bytes, fewer than the {size:,} it had then"
            )


def rewind(directory: RunDirectory, recorded: Positions) -> None:
    """Cut every file to its recorded size and remove those of the run that did not exist.

    ``rewards.jsonl``, ``environment.jsonl``, ``schedule.jsonl`` and ``budget.jsonl`` stay whole:
    repeated steps read what follows.  A file that has lost lines keeps those that are whole, and
    one of these four gets a line of as many bytes in place of the lost ones, so that what follows
    begins at the recorded size.
    """
    names = {str(path.relative_to(directory.root)) for path in _journals(directory)}
    for name in sorted(names | recorded.keys()):
        path, size = directory.root / name, recorded.get(name)
        if path in (directory.rewards, directory.answers, directory.schedule, directory.budget):
            _fill_up(path, size or 0)
        elif size is None:
            path.unlink()
        elif path.is_file():
            os.truncate(path, _end_of_lines(path, size))


def _end_of_lines(path: Path, size: int) -> int:
    """``size``, or the end of the lines before it that are whole where the file has lost some."""
    if path.stat().st_size < size:
        return sum(map(len, whole_lines(path, 0)))
    if path.suffix != ".jsonl":
        return size
    return read_plain(path, largest=None).rfind(b"\n", 0, size) + 1


def _fill_up(path: Path, size: int) -> None:
    """Lengthen a file of lines that is shorter by one that says how many bytes are lost."""
    present = path.stat().st_size if path.is_file() else 0
    if present >= size:
        return
    kept = read_plain(path, largest=None) if present else b""
    kept = kept[: kept.rfind(b"\n") + 1]
    lost = size - len(kept)
    line = json_line({"lost_bytes": lost})
    line = line if len(line) <= lost else b"{}\n"
    with path.open("ab") as file:
        file.truncate(len(kept))
        file.write(line[:-1].ljust(lost - 1) + b"\n")


def whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines after byte ``position``, up to the first that is unfinished or damaged."""
    if not path.is_file():
        return []
    lines: list[bytes] = []
    for line in read_plain(path, largest=None)[position:].splitlines(keepends=True):
        if not line.endswith(b"\n") or parsed_line(line) is None:
            break
        lines.append(line)
    return lines


def _journals(directory: RunDirectory) -> list[Path]:
    """The files that exist and are not links."""
    events = sorted(directory.tensorboard.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))
    files = (*directory.growing, *events)
    return [path for path in files if path.is_file() and not path.is_symlink()]


def read_lines(path: Path, position: int = 0) -> list[dict[str, Any] | None]:
    """The JSON objects from byte ``position`` on, None for a damaged line.  Raises OSError."""
    if not path.is_file():
        return []
    with open_plain(path) as file:
        file.seek(position)
        return [parsed_line(line) for line in file]
