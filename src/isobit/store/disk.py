"""The disk of a run: the space that it needs before it begins, waiting when the disk fills up
later, and whether all hosts see the same output directory.

    a checkpoint     4 P bytes and the moments'      FP32 masters of P parameters, and what
                                                     ``isobit.training.optimiser.moment_bytes`` says
                     and those of extras             a refreshed reference model, for example
    the model        2 P bytes                       in BF16, at the end

An old checkpoint is removed only once the new one is complete, so at the last save the disk holds
the ``keep_last`` before it, the new one, those of ``keep_every``, and the best.

When the disk fills up during the run, each write is retried until there is space or
``checkpoint.wait_for_space_s`` seconds have passed, since all that was learned after the last
checkpoint is in memory alone.  A signal ends the wait within a second.  All ranks count the same
pauses instead of reading their clocks, so that none gives up before another.

Which checkpoint a run resumes from, and what happens to the others.

The newest checkpoint with intact bytes is used.  A damaged one is reported, with the file and what
is wrong, and renamed to ``step_000010.unusable``; then the one before it is tried.  Hidden folders
that a killed process was writing or removing are removed, and that is reported.  Rank 0 decides;
the other ranks read their part of each checkpoint.
"""

import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

from isobit.config.tables import CheckpointConfig, EvaluationConfig
from isobit.config.training import OptimisationConfig
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.parallel.world import ALONE, World, broadcast, raised_on_all, run_on_all, write_on_first
from isobit.store.checkpoint import (
    Checkpoint,
    folder_name,
    folders_by_step,
    read_checkpoint,
    step_of,
)
from isobit.store.directory import RunDirectory, check_positions
from isobit.training.optimiser import moment_bytes
from isobit.util.errors import CheckpointError, ConfigError, NoSpaceError, StorageError
from isobit.util.files import LARGE, disk_errors, free_bytes
from isobit.util.terminal import gib

_BESIDE_TENSORS = 1 << 16
"""Headers, counters and manifest of a checkpoint; configuration and tokenizer of a model."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What a run writes, apart from its logs, with at most ``checkpoints`` on disk at once."""

    root: Path
    checkpoint_bytes: int
    checkpoints: int
    on_disk: int  # checkpoints that exist already
    model_bytes: int
    free: int

    @property
    def needed(self) -> int:
        """Bytes that the run will still write."""
        return max(self.checkpoints - self.on_disk, 0) * self.checkpoint_bytes + self.model_bytes

    def describe(self) -> str:
        """A line with what the run writes and what is free."""
        room = f"{gib(self.needed)} of {gib(self.free)} free in {self.root}"
        return f"disk: {room} for {self._contents}"

    def describe_needs(self) -> str:
        """The line of another machine's disk."""
        return f"disk: {gib(self.needed)} for {self._contents}"

    @property
    def _contents(self) -> str:
        parts = [f"the trained model of {gib(self.model_bytes)}"]
        if self.checkpoints:
            there = f", of which {self.on_disk} are there" if self.on_disk else ""
            parts.insert(
                0,
                f"checkpoints of {gib(self.checkpoint_bytes)}, at most {self.checkpoints} at "
                f"once{there}",
            )
        return " and ".join(parts)

    def check(self) -> None:
        """Raise StorageError where the disk has too little space."""
        if self.needed > self.free:
            raise StorageError(
                f"{self.describe()}: too little; lower checkpoint.keep_last (0 writes no "
                "checkpoint at all), set checkpoint.every = 0 (a checkpoint at the end only), "
                "free some space, or name a directory on another disk (--output PATH)"
            )


def plan_disk(
    root: Path,
    shape: ModelConfig,
    training: OptimisationConfig,
    checkpoint: CheckpointConfig,
    evaluation: EvaluationConfig,
    on_disk: Collection[int] = (),
    extra_bytes: int = 0,
) -> DiskPlan:
    """The plan of a run in ``root`` of a model of ``shape``, which has checkpoints of the steps
    ``on_disk``; each holds at most ``extra_bytes`` of tensors of extras.
    """
    masters = [prod(sizes) for sizes in master_shapes(shape).values()]
    size = 4 * sum(masters) + moment_bytes(masters, training.moments)
    size += extra_bytes + _BESIDE_TENSORS
    model = 2 * sum(masters) + _BESIDE_TENSORS
    most = most_at_once(training.steps, checkpoint, evaluation.every, on_disk)
    return DiskPlan(root, size, most, len(on_disk), model, free_bytes(root))


def most_at_once(
    steps: int, rules: CheckpointConfig, evaluated_every: int = 0, on_disk: Collection[int] = ()
) -> int:
    """The most checkpoints on disk: at the last of ``steps``, before old ones are removed."""
    if rules.keep_last == 0:
        return len(on_disk)
    newest, last = max(on_disk, default=0), rules.keep_last + 1
    # ranges, and no list of steps: there may be 10^7
    due = _multiples(rules.every, steps)
    due = due[newest // rules.every :] if due else due
    end = [steps] if steps > newest else []
    recent = {*[*sorted(on_disk)[-last:], *due[-last:], *end][-last:]}

    def stays(step: int) -> bool:
        return step in recent or (rules.keep_every > 0 and step % rules.keep_every == 0)

    together = len(recent) + sum(stays(step) for step in {*on_disk, *end} - recent)
    if rules.keep_every and due:
        both = lcm(rules.every, rules.keep_every)
        others = range(both * (newest // both + 1), steps, both)
        together += len(others) - sum(step in others for step in recent)
    another = rules.keep_best is not None and not (
        together == len(on_disk) + len(due) + len(end)
        and all(
            stays(step) and (step in on_disk or step in due or step in end)
            for step in _multiples(evaluated_every, steps)
        )
    )
    return max(together + another, len(on_disk))


def _multiples(every: int, steps: int) -> range:
    """Every so many steps, without the last; none for 0."""
    return range(every, steps, every) if every else range(0)


T = TypeVar("T")
FIRST_S, LONGEST_S = 2.0, 60.0
"""Pauses between attempts, each twice the one before: only writing notices a quota."""
LOOK_S = 0.5  # between two looks for signals in a pause
SAID_EVERY_S = 120.0


class WaitingWriter:
    """Writes the files of a run in ``root``, and waits where the disk is full."""

    def __init__(
        self,
        world: World,
        root: Path,
        seconds: float,
        say: Callable[[str], None],
        look: Callable[[], None],
    ) -> None:
        """``look`` raises Interrupted where this rank has received a signal to stop."""
        self._world, self._root, self._say, self._look = world, root, say, look
        self._seconds = seconds

    def follow(self, root: Path) -> None:
        """Continue in the run's directory ``root``."""
        self._root = root

    def give_up(self) -> None:
        """Wait no more: a full disk is an error at once."""
        self._seconds = 0

    def write(self, attempt: Callable[[], T]) -> T:
        """``attempt``, on all ranks together, repeated where it raises NoSpaceError on all, which
        is raised in the end; raises Interrupted on all after a signal.
        """
        waited, said_at, pause = 0.0, -SAID_EVERY_S, FIRST_S
        while True:
            try:
                made = attempt()
            except NoSpaceError as error:
                left = self._seconds - waited
                if left <= 0:
                    self.give_up()
                    raise
                if waited - said_at >= SAID_EVERY_S:
                    said_at = waited
                    self._say(
                        f"note: {error}; trying again for {left:.0f} s "
                        "(checkpoint.wait_for_space_s), in which nothing is lost"
                    )
                pause = min(pause, left)
            else:
                if waited:
                    self._say(f"there is room again, after {waited:.0f} s: going on")
                return made
            self._pause(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_S)

    def write_on_first(self, attempt: Callable[[], None]) -> None:
        """``write`` of what rank 0 does alone; its error is raised on all."""

        def first() -> None:
            with disk_errors(self._root, "the files of the run"):
                attempt()

        self.write(lambda: write_on_first(self._world, first))

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            run_on_all(self._world, self._look)
            sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S


PATIENCE_S = 5.0  # a network file system may show a new file this much later


def check_shared(world: World, root: Path) -> None:
    """Raise ConfigError on all ranks, naming those that do not see a file that rank 0 writes where
    the run's directory ``root`` is or will be.

    All ranks write a checkpoint into the same files.  If each host had its own disk, each would
    keep a useless part.
    """
    if world.size == 1:
        return
    above = (root.absolute(), *root.absolute().parents)

    def leave() -> tuple[int, str]:
        level = next(level for level, place in enumerate(above) if place.is_dir())
        name = f".isobit-{secrets.token_hex(8)}"
        with disk_errors(above[level], "a file for the other ranks"):
            (above[level] / name).touch()
        return level, name

    level, name = broadcast(world, leave)
    place = above[level] if level < len(above) else above[-1]
    mine = f"rank {world.rank} on {world.host}: {place}"
    found = world.all_gather([mine, _appears(place / name)])
    if world.rank == 0:
        with suppress(OSError):
            (place / name).unlink()
    blind = [where for where, sees in found if not sees]
    if blind:
        raise raised_on_all(
            ConfigError(
                f"output is {str(root)!r}, and what rank 0 writes there is not seen by\n"
                + "".join(f"  {where}\n" for where in blind)
                + "put it on a file system that all hosts share, under the same path (--output "
                "PATH), or write no checkpoints (checkpoint.keep_last = 0)"
            )
        )


def _appears(path: Path) -> bool:
    """Whether a file exists within PATIENCE_S."""
    last = monotonic() + PATIENCE_S
    while True:
        with suppress(OSError):  # reading the folder is what makes a network file system look again
            if path.name in (other.name for other in path.parent.iterdir()):
                return True
        if monotonic() >= last:
            return False
        sleep(0.2)


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
    """Which file is missing or shorter than it was, on all ranks; None where all are intact."""

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
