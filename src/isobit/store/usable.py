"""Which checkpoint of a run's directory a run goes on from, and what happens to the others.

The newest checkpoint whose bytes are right is used.  One that is damaged is named, with the file
and what is wrong, and the one before it is tried.  A damaged one is moved aside, not removed:
``step_000010.unusable``.  Hidden folders that a killed process left half written or half removed
are removed, with a line that says so.

Rank 0 looks and decides; the other ranks read their part of each checkpoint.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from isobit.parallel.world import ALONE, World, broadcast, raised_on_all
from isobit.store.checkpoint import (
    Checkpoint,
    folder_name,
    folders_by_step,
    read_checkpoint,
    step_of,
)
from isobit.store.directory import RunDirectory, check_positions
from isobit.util.errors import CheckpointError
from isobit.util.files import LARGE
from isobit.util.terminal import gib

Say = Callable[[str], None]
"""Prints a line."""


def newest_usable(directory: RunDirectory, say: Say, world: World = ALONE) -> Checkpoint | None:
    """The newest checkpoint whose bytes are right, None where there never was one; all ranks
    together.  Raises CheckpointError if there are only others.

    One whose files that grow (figures, completions) have lost lines since is used where no older
    one has all of its own: what was learnt is worth more.
    """
    problems: list[str] = []
    whole: Checkpoint | None = None
    for step, size in broadcast(world, lambda: _candidates(directory, say)):
        folder = directory.checkpoints / folder_name(step)
        if size >= LARGE:
            say(f"checking the checkpoint of step {step}: {gib(size)}")
        try:
            checkpoint = read_checkpoint(folder, world)
            lost = _lost_lines(directory, checkpoint, world)
            whole = whole or (checkpoint if lost else None)
            if lost:
                raise CheckpointError(lost)
        except CheckpointError as error:
            problems.append(str(error))
            say(f"checkpoint {folder.name} cannot be used: {error}")
            continue
        if problems:
            say(f"using the one before it: {folder.name}")
        return checkpoint
    if whole is not None:
        say(
            f"none has all of its lines; using {whole.folder.name}, which is whole: the lines that "
            "are lost stay lost, and the policy is what it was"
        )
        return whole
    if problems:
        raise raised_on_all(
            CheckpointError(
                "\n".join(
                    [
                        f"no checkpoint in {directory.checkpoints} can be used",
                        *(f"  {problem}" for problem in problems),
                        f"put back a good copy, or remove {directory.checkpoints} to begin again "
                        "at step 1 with --resume",
                    ]
                )
            )
        )
    return None


def tidy(directory: RunDirectory, step: int, say: Say) -> None:
    """Move unusable checkpoints aside, and remove what was left half written or half removed."""
    for folder in sorted(directory.checkpoints.iterdir()) if directory.checkpoints.is_dir() else []:
        found = step_of(folder)
        if found is not None and found > step:
            aside = folder.with_name(f"{folder_name(found)}.unusable")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            say(f"moved aside: {aside}")
        elif folder.name.startswith(".") and _is_ours(folder):
            shutil.rmtree(folder)
            say(f"removed what an interrupted write left: {folder}")
    for name in (".model.partial", ".model.old"):
        shutil.rmtree(directory.root / name, ignore_errors=True)
    directory.summary.unlink(missing_ok=True)
    directory.ending.unlink(missing_ok=True)


def _candidates(directory: RunDirectory, say: Say) -> list[tuple[int, int]]:
    """Steps and bytes of the checkpoints, the newest first; what else lies there is named."""
    try:
        folders = sorted(directory.checkpoints.iterdir()) if directory.checkpoints.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"{directory.checkpoints} cannot be read: {error.strerror}; once it can, go on with "
            "--resume"
        ) from None
    others = [folder.name for folder in folders if step_of(folder) is None and not _is_ours(folder)]
    if others:
        say(f"ignored in {directory.checkpoints}: {', '.join(others)} (no checkpoint)")
    steps = sorted(folders_by_step(directory.checkpoints).items(), reverse=True)
    return [(step, _size(folder)) for step, folder in steps]


def _size(folder: Path) -> int:
    """Bytes of its files, as far as they can be looked at: reading it says what is wrong."""
    try:
        return sum(file.lstat().st_size for file in folder.iterdir())
    except OSError:
        return 0


def _lost_lines(directory: RunDirectory, checkpoint: Checkpoint, world: World) -> str | None:
    """Which file is gone or shorter than it was, on all ranks; None where all are there."""

    def problem() -> str | None:
        try:
            check_positions(directory, checkpoint.state["files"])
        except CheckpointError as error:
            return str(error)
        return None

    return broadcast(world, problem)


def _is_ours(folder: Path) -> bool:
    """Leftovers of writing and removing, and checkpoints moved aside."""
    return (
        folder.name.startswith(".step_") and folder.suffix in (".partial", ".deleted")
    ) or ".unusable" in folder.name
