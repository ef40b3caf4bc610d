"""``budget.jsonl``: a line for every change of the tokens a micro-batch, written before the change
takes effect; one that a resume has allowed has ``"allowed": true``.  A run is a pure function of
its configuration, data, rewards and these changes, so a resumed run makes them again at the same
updates.  From the update after 13 others, in step 7:

    {"step": 7, "update": 13, "old": 4096, "new": 2048}
"""

import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from isobit.store.journals import whole_lines
from isobit.training.budget import BudgetChange
from isobit.util.disk_space import LineFile
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import json_line, parsed_line


def write_change(path: Path, step: int, change: BudgetChange) -> None:
    """Add a line and sync it.  Raises OSError and StorageError, and then leaves no part of it."""
    file = LineFile(path)
    try:
        file.write(json_line({"step": step, **change.content()}), lasting=True)
    finally:
        file.close()


def read_changes(path: Path, position: int, say: Callable[[str], None]) -> list[BudgetChange]:
    """The changes after byte ``position``, up to a line that is none, which is said; none where
    there is no file.
    """
    changes = list[BudgetChange]()
    content = read_plain(path, largest=None)[position:] if path.is_file() else b""
    *lines, _unfinished = content.split(b"\n")
    for line in lines:
        try:
            changes.append(BudgetChange.of_line(parsed_line(line) or {}))
        except (KeyError, TypeError):
            say(
                f"{path} has a damaged line: the changes from there on are not made again, and "
                "repeated steps may have other bits"
            )
            break
    return changes


def keep_changes(path: Path, position: int, changes: Sequence[BudgetChange], step: int) -> None:
    """Leave these changes after byte ``position``: those of the file as far as they are the same,
    then the others, written as changes in ``step``.  Raises as ``write_change``.
    """
    pairs = zip(read_changes(path, position, lambda _: None), changes, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if path.is_file():
        kept = whole_lines(path, position)[:same]
        os.truncate(path, position + sum(map(len, kept)))
    for change in changes[same:]:
        write_change(path, step, change)
