"""Writes the checkpoints of a run when they are due, and when the run ends before its time.

Due is one every n steps, after the last step, and where an evaluation was the best so far
(``keep_best``); none with ``keep_last = 0``. Before its time, a run ends by

    a signal            the last moment between two steps is written, if it is not on the disk
                        already
    an error            of any kind: the same, and the policy as a model folder, as far as either
                        can still be written
    a second Ctrl-C     nothing is written: the process may be in the middle of anything

Weights that are not finite are written nowhere: a checkpoint of them would take the place of a good
one.  Why the run has ended stays in ``ending.json``, until it goes on.  Where its directory was
moved, the last checkpoint goes there; where it was removed, it is made again for it.

All ranks write a checkpoint together.  So of several processes nothing is written after an error
that only one rank knows of: the others are still waiting for it in the middle of something, and the
launcher ends them.  Errors that all have agreed on, signals too, are as good as one process's
(``isobit.parallel.world.is_agreed``).

Which checkpoints stay: the newest, every so many steps, and the best.  Decided from what is on
the disk, after each new one.

A checkpoint is renamed to a hidden name before its files go, so that a kill in between leaves
nothing that looks like a damaged one.

How much of a run's time goes into its checkpoints: a file system that is slow, or has become so,
shows in nothing else.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import prod
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from isobit.config.tables import CheckpointConfig
from isobit.models.folder import write_model
from isobit.parallel.world import broadcast, is_raised_on_all, run_on_all
from isobit.store.checkpoint import (
    Snapshot,
    folder_name,
    folders_by_step,
    read_manifest,
    write_checkpoint,
)
from isobit.store.directory import RunDirectory, sync_journals, write_json
from isobit.store.manifest import TrainingRun, environment
from isobit.store.resume import Start
from isobit.store.state import Boundary, holds, snapshot
from isobit.util.errors import (
    CheckpointError,
    Interrupted,
    IsobitError,
    NonFiniteError,
    StoppedAtOnce,
    StorageError,
)


def steps_to_keep(figures: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Of the steps on disk, those that stay; ``figures`` holds the value to be best by, None where
    there was no evaluation.
    """
    steps = sorted(figures)
    keep = set(steps[-config.keep_last :])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    best = best_step(figures)
    return keep if best is None else keep | {best}


def best_step(figures: Mapping[int, float | None]) -> int | None:
    """The first step with the highest value."""
    known = {step: value for step, value in sorted(figures.items()) if value is not None}
    return max(known, key=known.__getitem__) if known else None


def worth(figures: Mapping[str, float], name: str) -> float | None:
    """The figure to be best by, None where it was not measured; the best has the highest, so that a
    loss is negated.
    """
    value = figures.get(name)
    return -value if value is not None and name.endswith("/loss") else value


def best_on_disk(parent: Path, name: str) -> int | None:
    """The step of the best checkpoint in ``parent`` by an evaluation figure; None where none of
    them has it.
    """
    folders = folders_by_step(parent)
    return best_step({step: _figure(folder, name) for step, folder in folders.items()})


def apply_retention(parent: Path, config: CheckpointConfig) -> None:
    """Remove the checkpoints in ``parent`` that need not stay."""
    figures = {
        step: _figure(folder, config.keep_best) for step, folder in folders_by_step(parent).items()
    }
    for step in sorted(figures.keys() - steps_to_keep(figures, config)):
        hidden = parent / f".{folder_name(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        (parent / folder_name(step)).rename(hidden)
        shutil.rmtree(hidden)


def _figure(folder: Path, name: str | None) -> float | None:
    try:
        return worth(read_manifest(folder)["evaluation"], name) if name else None
    except CheckpointError:
        return None


SLOW_S, SLOW_SHARE = 30.0, 0.1
"""A save that takes longer than this, and more than this share of the time from the one before to
its own end, is told of.
"""


class SaveTime:
    """Of the checkpoints of one process, written every so many steps."""

    def __init__(self, every: int, now: Callable[[], float] = monotonic) -> None:
        """``now`` gives seconds, and never runs back."""
        self._every, self._now = every, now
        self._seconds, self._since, self._said = 0.0, 0.0, 0.0
        self._ended_at = now()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes a checkpoint; one that fails counts for nothing."""
        began_at = self._now()
        yield
        ended_at = self._now()
        self._seconds, self._since = ended_at - began_at, ended_at - self._ended_at
        self._ended_at = ended_at

    def notes(self, step: int, num_bytes: int, folder: Path) -> list[str]:
        """What a user should know of the last one, of ``num_bytes``; again only where it has taken
        twice as long as what was said.
        """
        share = self._seconds / self._since if self._since else 0.0
        if self._seconds <= max(SLOW_S, 2 * self._said) or share <= SLOW_SHARE:
            return []
        self._said = self._seconds
        return [
            f"the checkpoint of step {step} took {self._seconds:.0f} s, {share:.0%} of the time "
            f"since the one before, at {num_bytes / self._seconds / 1e6:,.1f} MB/s; write fewer "
            f"(checkpoint.every = {self._every}), or use a disk that is faster than that under "
            f"{folder} (--output PATH)"
        ]


class Announces(Protocol):
    """Where lines are printed."""

    def line(self, text: str = "") -> None:
        """Print one line."""
        ...

    def writing(self, what: str, num_bytes: int) -> AbstractContextManager[None]:
        """A block in which ``what`` is written."""
        ...

    def notes(self, notes: Sequence[str]) -> None:
        """Print what is worth knowing and ends nothing."""
        ...


class CheckpointKeeper:
    """Writes a run's checkpoints; entered for the steps of the run.

    ``boundary`` is the last moment between two steps, which the run sets after every step and every
    evaluation: a checkpoint holds that.  ``evaluations`` returns the figures of every evaluation so
    far, by step.  With ``model_when_interrupted`` a signal leaves a model folder, too.
    """

    def __init__(
        self,
        run: TrainingRun,
        start: Start,
        boundary: Boundary,
        evaluations: Callable[[], Mapping[int, Mapping[str, float]]],
        console: Announces,
        model_when_interrupted: bool = False,
    ) -> None:
        self.boundary = boundary
        self._run, self._evaluations, self._console = run, evaluations, console
        self._config = run.config.checkpoint
        self._environment = environment(run.model.policy.device)
        self._model_when_interrupted = model_when_interrupted
        self._directory, self._world, self._watch = start.directory, start.world, start.watch
        self._writer = start.writer
        self._save_time = SaveTime(self._config.every)
        self._is_ours = True
        """Whether what is called as the run's directory was is that still."""
        self._on_disk = (
            start.step
        )  # step 0 needs no checkpoint: it is a function of the configuration

    def __enter__(self) -> Self:
        if self._config.keep_last:  # the run may have been killed before it came to it
            self._apply_retention()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, StoppedAtOnce):
            return
        if self._all_end(error):
            self._save_at_the_end(isinstance(error, Interrupted))
        self._note_ending(error)

    def check_place(self) -> None:
        """Raise StorageError where the run's directory was moved or removed."""
        self._watch.check()

    def _save_at_the_end(self, is_interrupted: bool) -> None:
        """What stands, and how to go on.  An error of its own is said: the first one counts.  Who
        has asked to stop does not wait for a full disk.
        """
        cause = "" if is_interrupted else "once the cause is gone, "
        if is_interrupted:
            self._writer.give_up()
        try:
            self._follow()
            self._save_what_stands()
            if self._model_when_interrupted or not is_interrupted:
                self._save_last_weights()
        except (Exception, Interrupted) as second:
            if is_interrupted:
                raise
            self._console.line(f"stopped early, and no more could be saved: {second}")
        self._console.line(f"checkpoint: {self._where()}; {cause}go on with {self._how()}")

    def _follow(self) -> None:
        """To where the directory is now."""
        if self._world.size == 1 and self._watch.now() == self._directory.root:
            return
        root = broadcast(self._world, self._root_now)
        if root != str(self._directory.root):
            self._directory = RunDirectory(Path(root))
            self._writer.follow(self._directory.root)

    def _root_now(self) -> str:
        place, root = self._watch.now(), self._directory.root
        if place is None:
            if root.exists():
                self._is_ours = False
                raise StorageError(f"{root} is another directory now, and not this run's")
            self._console.line(f"{root} was removed: it is made again for what can still be saved")
        return str(place or root)

    def _note_ending(self, error: BaseException) -> None:
        """For the report."""
        if self._world.rank > 0 or not self._is_ours:
            return
        reason = (
            f"{error}"
            if isinstance(error, (IsobitError, Interrupted))
            else (f"{type(error).__name__}: {error}")
        )
        content = {
            "step": self.boundary.step,
            "kind": type(error).__name__,
            "reason": reason,
            "checkpoint": self._on_disk or None,
        }
        with suppress(OSError):  # nothing more can be said of a disk that takes nothing
            if self._directory.root.is_dir():
                write_json(self._directory.ending, content)

    def _all_end(self, error: BaseException) -> bool:
        """Whether every rank has come here, so that all can save together."""
        if self._world.size == 1 or is_raised_on_all(error):
            return True
        self._console.line(
            f"not all ranks can save; checkpoint: {self._where()}; once the cause is gone, go on "
            f"with {self._how()}"
        )
        return False

    def save_if_due(self, step: int) -> None:
        """The checkpoint after ``step``, if one is asked for."""
        every = self._config.every
        if (
            (every > 0 and step % every == 0)
            or step == self._run.config.training.steps
            or self._is_best(step)
        ):
            self._save()

    def save_now(self) -> None:
        """A checkpoint that somebody has asked for."""
        self._save()
        self._console.line(f"checkpoint: {self._where()}")

    def save_model(self) -> None:
        """The policy as a Hugging Face folder; an older one is replaced as a whole.  All ranks
        together.
        """
        self._check_finite()
        self._world.pulse.beat("model folder")
        num_bytes = 2 * sum(map(prod, self._run.model.policy.shapes.values()))
        with self._console.writing("the trained model", num_bytes):
            self._writer.write(lambda: write_model(self._run.model, self._directory.model))

    def _save_last_weights(self) -> None:
        if all(self._world.all_gather(self._run.trainer.is_whole)):
            self.save_model()
            self._console.line(
                f"stopped early: the weights of the last update are in {self._directory.model}"
            )

    def _save_what_stands(self) -> None:
        if all(self._world.all_gather(holds(self.boundary, self._run))):
            self._save()

    def _save(self) -> None:
        boundary = self.boundary
        if boundary.step == self._on_disk or self._config.keep_last == 0:
            return
        self._check_finite()
        self._world.pulse.beat("checkpoint")
        content = snapshot(boundary, self._run, self._environment)
        self._writer.write_on_first(lambda: sync_journals(self._directory))
        with self._console.writing(f"the checkpoint of step {boundary.step}", content.num_bytes):
            self._writer.write(lambda: self._write(content))
        folder = self._directory.checkpoints
        self._console.notes(self._save_time.notes(boundary.step, content.num_bytes, folder))
        self._on_disk = boundary.step
        self._apply_retention()

    def _write(self, content: Snapshot) -> None:
        with self._save_time.writing():
            write_checkpoint(self._directory.checkpoints, content, self._world)

    def _check_finite(self) -> None:
        """Raise NonFiniteError, on all ranks, where a weight is not finite on any."""

        def look() -> None:
            for name, master in self._run.model.policy.masters.items():
                if not bool(master.detach().isfinite().all()):
                    raise NonFiniteError(
                        f"the weights of {name} are not finite: neither a checkpoint nor a model "
                        "of them is written"
                    )

        run_on_all(self._world, look)

    def _apply_retention(self) -> None:
        self._writer.write_on_first(
            lambda: apply_retention(self._directory.checkpoints, self._config)
        )

    def _is_best(self, step: int) -> bool:
        name = self._config.keep_best
        if name is None:
            return False
        worths = {
            done: worth(figures, name) for done, figures in self._evaluations().items() if done > 0
        }
        values = {done: value for done, value in worths.items() if value is not None}
        return step in values and all(
            value < values[step] for done, value in values.items() if done < step
        )

    def _where(self) -> str:
        if self._on_disk == 0:
            return (
                "none, no step was finished"
                if self._config.keep_last
                else "none, since checkpoint.keep_last is 0"
            )
        return str(self._directory.checkpoints / folder_name(self._on_disk))

    def _how(self) -> str:
        root = self._directory.root
        is_moved = root != self._run.config.output
        return f"--output {root} --resume" if is_moved else "--resume"
