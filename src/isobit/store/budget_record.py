"""``budget.jsonl``: every change of the tokens a micro-batch, one line each, on the disk before
anything is learnt with it.

    {"step": 7, "update": 13, "old": 4096, "new": 2048}

says that from the update after 13 others on, which is in step 7, there are fewer.

A run is a pure function of its configuration, its data, its rewards and these changes.  A run that
is resumed from a checkpoint before such a line reads it, and makes the change at the same update.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from isobit.files import LineFile
from isobit.store.journal import whole_lines
from isobit.training.budget import BudgetChange


def write_change(path: Path, step: int, change: BudgetChange) -> None:
    """Add a line and wait until it is on the disk.  Raises OSError and StorageError, and leaves no
    part of it then.
    """
    file = LineFile(path)
    try:
        file.write((json.dumps({"step": step, **asdict(change)}) + "\n").encode(), lasting=True)
    finally:
        file.close()


def read_changes(path: Path, position: int) -> list[BudgetChange]:
    """The changes after byte ``position``; none where there is no file."""
    lines = map(json.loads, whole_lines(path, position))
    return [BudgetChange(line["update"], line["old"], line["new"]) for line in lines]


def drop_torn_line(path: Path) -> None:
    """Cut a last line that was left unfinished, so that the next one begins at its own start."""
    if path.is_file():
        os.truncate(path, sum(map(len, whole_lines(path, 0))))
