"""The choice of the checkpoint that a run resumes from, and what happens to the others.

The newest checkpoint with intact bytes is used.  A damaged one is reported, with the file and what
is wrong, and renamed to ``step_000010.unusable``; then the one before it is tried.  Hidden folders
that a killed process was writing or removing are removed, and that is reported.  Rank 0 decides;
the other ranks read their part of each checkpoint.
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
from isobit.store.directory import RunDirectory
from isobit.store.journals import check_positions
from isobit.util.errors import CheckpointError
from isobit.util.files import LARGE
from isobit.util.terminal import gib

Say = Callable[[str], None]


def newest_usable(directory: RunDirectory, say: Say, world: World = ALONE) -> Checkpoint | None:
    """The newest checkpoint with intact bytes, None where there never was one; collective.  Raises
    CheckpointError if all are damaged.

    One whose figures or completions have lost lines since is used only where no older checkpoint
    has all of its own.
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
        lines = [
            f"no checkpoint in {directory.checkpoints} can be used",
            *(f"  {problem}" for problem in problems),
            f"put back a good copy, or remove {directory.checkpoints} to begin again at step 1 "
            "with --resume",
        ]
        raise raised_on_all(CheckpointError(*lines))
    return None


def tidy(directory: RunDirectory, step: int, say: Say) -> None:
    """Rename unusable checkpoints, and remove what was left partly written or partly removed."""
    for folder in sorted(directory.checkpoints.iterdir()) if directory.checkpoints.is_dir() else []:
        number = step_of(folder)
        if number is not None and number > step:
            aside = folder.with_name(f"{folder_name(number)}.unusable")
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
    """Steps and bytes of the checkpoints, the newest first; other entries are reported."""
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
    """Bytes of its files; 0 where they cannot be listed, since reading then says what is wrong."""
    try:
        return sum(file.lstat().st_size for file in folder.iterdir())
    except OSError:
        return 0


def _lost_lines(directory: RunDirectory, checkpoint: Checkpoint, world: World) -> str | None:
    """The file that is missing or shorter than it was, on all ranks; None where all are intact."""

    def problem() -> str | None:
        try:
            check_positions(directory, checkpoint.state["files"])
        except CheckpointError as error:
            return str(error)
        return None

    return broadcast(world, problem)


def _is_ours(folder: Path) -> bool:
    """Whether it is a leftover of writing or removing, or a checkpoint moved aside."""
    return (
        folder.name.startswith(".step_") and folder.suffix in (".partial", ".deleted")
    ) or ".unusable" in folder.name
