"""The files of a run that only grow, and how they go back to where a checkpoint was taken.

A checkpoint records the size of each: ``metrics.jsonl``, ``completions.jsonl``, ``rewards.jsonl``,
``digests.jsonl``, ``budget.jsonl`` and the event files of TensorBoard. Everything in them up to
there belongs to steps before the checkpoint, and everything after it to steps that a resumed run
does again.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from isobit.errors import CheckpointError
from isobit.files import sync
from isobit.store.directory import RunDirectory

EVENTS_SUFFIX = ".isobit"
"""Of the event files that a run writes: only these are cut and removed, whatever else lies in the
folder.
"""
Positions = Mapping[str, int]
"""Bytes by path relative to the run's directory."""


def positions(directory: RunDirectory) -> dict[str, int]:
    """The sizes of the files now; whoever writes them has flushed."""
    return {
        str(path.relative_to(directory.root)): path.stat().st_size for path in _journals(directory)
    }


def sync_journals(directory: RunDirectory) -> None:
    """Wait until the files are on the disk: a checkpoint that counts on them comes after."""
    for path in _journals(directory):
        sync(path)
    for folder in (directory.tensorboard, directory.root):
        if folder.is_dir():
            sync(folder)


def check_positions(directory: RunDirectory, recorded: Positions) -> None:
    """Raise CheckpointError for a file that is gone or shorter than a checkpoint recorded."""
    for name, size in recorded.items():
        path = directory.root / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, which had {size:,} bytes then") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if found < size:
            raise CheckpointError(
                f"{path} has {found:,} bytes, fewer than the {size:,} it had then"
            )


def rewind(directory: RunDirectory, recorded: Positions) -> None:
    """Cut every file to its recorded size and remove those of the run that were not there.

    ``rewards.jsonl`` and ``budget.jsonl`` stay whole: what lies beyond their positions is wanted
    for the steps that are done again.  A file that has lost lines keeps those that are whole.
    """
    names = {str(path.relative_to(directory.root)) for path in _journals(directory)}
    for name in sorted(names | recorded.keys()):
        path, size = directory.root / name, recorded.get(name)
        if path in (directory.rewards, directory.budget):
            continue
        if size is None:
            path.unlink()
        elif path.is_file():
            is_short = path.stat().st_size < size
            os.truncate(path, sum(map(len, whole_lines(path, 0))) if is_short else size)


def whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines after byte ``position``, none where there is no file; one that a killed process
    left unfinished is no line, nor is anything after a damaged one.
    """
    if not path.is_file():
        return []
    lines: list[bytes] = []
    for line in path.read_bytes()[position:].splitlines(keepends=True):
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if not whole:
            break
        lines.append(line)
    return lines


def _journals(directory: RunDirectory) -> list[Path]:
    """The files that are there, and no link: those behind one are not the run's."""
    events = sorted(directory.tensorboard.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))
    files = (*directory.growing, *events)
    return [path for path in files if path.is_file() and not path.is_symlink()]
