"""Writes a run's checkpoints when they are due and when the run ends early, and removes old ones.

A checkpoint is due every n steps, after the last step, and where an evaluation was the best so far
(``keep_best``); none with ``keep_last = 0``.  The newest, every so many steps, and the best stay.
A run ends early by

    a signal            the last state between two steps is written, if it is not on disk already
    an error            the same, and the policy as a model folder, as far as either can be written
    a second Ctrl-C     nothing is written: the process may be in the middle of anything

Weights that are not finite are never written, since they would replace a good checkpoint.  Why the
run ended stays in ``ending.json`` until it is resumed.  Where its directory was moved, the last
checkpoint goes there; where it was removed, it is created again.

After each checkpoint and model that is complete, ``checkpoint.on_save`` is run by rank 0 as a
process of its own, for which all wait.

All ranks write a checkpoint together.  So nothing is written after an error that only one rank
knows of: the others are waiting for it, and the launcher ends them.  After errors that all have
raised, and signals, all can write (``isobit.parallel.world.is_raised_on_all``).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import prod
from pathlib import Path
from time import monotonic
from typing import Protocol, Self

from isobit.config.tables import CheckpointConfig
from isobit.models.folder import write_model
from isobit.parallel.world import broadcast, is_raised_on_all, run_on_all
from isobit.store.checkpoint import folder_name, folders_by_step, read_manifest, write_checkpoint
from isobit.store.directory import RunDirectory, write_json
from isobit.store.journals import sync_journals
from isobit.store.manifest import environment
from isobit.store.resume import Start
from isobit.store.state import Boundary, holds, snapshot
from isobit.store.training_run import TrainingRun
from isobit.util.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    IsobitError,
    NonFiniteError,
    StoppedAtOnce,
    StorageError,
)


def steps_to_keep(figures: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """The steps that stay, by each step's value; None where it was not evaluated."""
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
    """The value to compare, higher is better (a loss is negated); None if not measured."""
    value = figures.get(name)
    return -value if value is not None and name.endswith("/loss") else value


def best_on_disk(parent: Path, name: str) -> int | None:
    """The step of the best checkpoint in ``parent`` by an evaluation figure, if any has it."""
    folders = folders_by_step(parent)
    return best_step({step: _figure(folder, name) for step, folder in folders.items()})


def apply_retention(parent: Path, config: CheckpointConfig) -> None:
    """Remove the checkpoints in ``parent`` that need not stay.

    Each is renamed to a hidden name first, so that a kill in between leaves no damaged one.
    """
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
"""A longer save is reported, if it took this share of the time since the one before."""


class SaveTime:
    """How much of a run's time its checkpoints take, so that a slow file system is noticed."""

    def __init__(self, every: int, now: Callable[[], float] = monotonic) -> None:
        """``now`` gives monotonic seconds."""
        self._every, self._now = every, now
        self._seconds, self._since, self._said = 0.0, 0.0, 0.0
        self._ended_at = now()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes a checkpoint; one that fails does not count."""
        began_at = self._now()
        yield
        ended_at = self._now()
        self._seconds, self._since = ended_at - began_at, ended_at - self._ended_at
        self._ended_at = ended_at

    def notes(self, step: int, num_bytes: int, folder: Path) -> list[str]:
        """What to tell the user about the last save of ``num_bytes``; again only where it took
        twice as long as the one reported before.
        """
        share = self._seconds / self._since if self._since else 0.0
        if self._seconds <= max(SLOW_S, 2 * self._said) or share <= SLOW_SHARE:
            return []
        self._said = self._seconds
        return [
            f"the checkpoint of step {step} took {self._seconds:.0f} s, {share:.0%} of the time "
            f"since the one before, at {num_bytes / self._seconds / 1e6:,.1f} MB/s; write fewer "
            f"(checkpoint.every is {self._every}), or use a disk that is faster than that under "
            f"{folder} (--output PATH)"
        ]


_CALL = "import sys; from isobit.util.user_code import call_place; call_place(*sys.argv[1:])"


def check_hook(hook: str | Sequence[str] | None) -> None:
    """Raise ConfigError for a ``checkpoint.on_save`` that cannot be run."""
    if hook is None:
        return
    if isinstance(hook, str):
        source, _, name = hook.rpartition(":")
        if not source or not name.isidentifier():
            raise ConfigError(
                f"checkpoint.on_save is {hook!r}; name a Python function as "
                "path/to/file.py:function or module:function, or give a command as a list: "
                '["rsync", "-a", "{folder}", "there"]'
            )
        if source.endswith(".py") and not Path(source).is_file():
            raise ConfigError(f"checkpoint.on_save is {hook!r}, but there is no file {source!r}")
    elif not hook or shutil.which(hook[0]) is None:
        raise ConfigError(
            f"checkpoint.on_save is {list(hook)!r}, but there is no program "
            f"{hook[0] if hook else ''!r} in PATH; name one, by its path where it is elsewhere"
        )


def hook_command(hook: str | Sequence[str], folder: Path) -> list[str]:
    """The process that ``on_save`` stands for."""
    if isinstance(hook, str):
        return [sys.executable, "-c", _CALL, hook, str(folder)]
    filled = [word.replace("{folder}", str(folder)) for word in hook]
    return filled if filled != list(hook) else [*filled, str(folder)]


def run_hook(
    config: CheckpointConfig, folder: Path, output: Path, beat: Callable[[str], None]
) -> str | None:
    """Run ``on_save`` for a folder, and append what it prints to ``output``; ``beat`` is called
    while it runs.  -> What went wrong, if anything.
    """
    assert config.on_save is not None
    command, ends_at = hook_command(config.on_save, folder), monotonic() + config.on_save_limit_s
    try:
        with output.open("a+b") as file:
            began = file.seek(0, os.SEEK_END)
            process = subprocess.Popen(  # noqa: S603  # the user's own command
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            try:
                while process.poll() is None and monotonic() < ends_at:
                    beat("checkpoint.on_save")
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
            finally:
                if is_late := process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            file.seek(began)
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"cannot be run: {error.strerror or error}"
    last = f": {lines[-1][:300]}" if lines else ""
    if is_late:
        return f"was killed after {config.on_save_limit_s:g} s (on_save_limit_s){last}"
    if process.returncode:
        return f"failed with exit status {process.returncode}{last}"
    return None


class Announces(Protocol):
    def line(self, text: str = "") -> None: ...

    def writing(self, what: str, num_bytes: int) -> AbstractContextManager[None]: ...

    def notes(self, notes: Sequence[str]) -> None: ...


class CheckpointKeeper:
    """Writes a run's checkpoints; entered for the steps of the run.

    ``boundary`` is the last moment between two steps, which the run sets after every step and every
    evaluation: a checkpoint holds that.  ``evaluations`` returns the figures of every evaluation so
    far, by step.  With ``model_when_interrupted`` a signal leaves a model folder, too.
    ``write_card`` adds a model's card to its folder.
    """

    def __init__(
        self,
        run: TrainingRun,
        start: Start,
        boundary: Boundary,
        evaluations: Callable[[], Mapping[int, Mapping[str, float]]],
        console: Announces,
        model_when_interrupted: bool = False,
        write_card: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.boundary = boundary
        self._run, self._evaluations, self._console = run, evaluations, console
        self._config = run.config.checkpoint
        self._environment = environment(run.model.policy.device)
        self._model_when_interrupted, self._write_card = model_when_interrupted, write_card
        self._directory, self._world, self._watch = start.directory, start.world, start.watch
        self._writer = start.writer
        self._save_time = SaveTime(self._config.every)
        self._is_ours = True  # whether the directory at the run's path still is the run's
        self._on_disk = start.step  # step 0 follows from the configuration: no checkpoint

    def __enter__(self) -> Self:
        if self._config.keep_last:  # the run may have been killed before it came to it
            self._apply_retention()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, StoppedAtOnce):
            return
        if self._all_end(error):
            self._save_at_the_end(isinstance(error, Interrupted))
        self._note_ending(error)

    def check_place(self) -> None:
        """Raise StorageError where the run's directory was moved or removed."""
        self._watch.check()

    def _save_at_the_end(self, is_interrupted: bool) -> None:
        """Save and say how to resume.  A further error is only reported, since the first one
        counts. After a signal, a full disk is not waited for.
        """
        cause = "" if is_interrupted else "once the cause is gone, "
        if is_interrupted:
            self._writer.give_up()
        try:
            self._follow()
            if all(self._world.all_gather(holds(self.boundary, self._run))):
                self._save()
            if (self._model_when_interrupted or not is_interrupted) and all(
                self._world.all_gather(self._run.trainer.is_whole)
            ):
                self.save_model()
                whose = "of the last update" if self._run.trainer.updates else "before any update"
                self._console.line(
                    f"stopped early: the weights {whose} are in {self._directory.model}"
                )
        except (Exception, Interrupted) as second:
            if is_interrupted:
                raise
            self._console.line(f"stopped early, and no more could be saved: {second}")
        how = self._how()
        if not (is_interrupted or self.boundary.step):  # its recipe or its reward is to be mended
            how += (
                ", with --allow-change NAME after a change, or begin anew once "
                f"{self._directory.root} is removed"
            )
        self._console.line(f"checkpoint: {self._where()}; {cause}go on with {how}")

    def _follow(self) -> None:
        """Use the directory where it is now."""
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
        every = self._config.every
        if (
            (every > 0 and step % every == 0)
            or step == self._run.config.training.steps
            or self._is_best(step)
        ):
            self._save()

    def save_now(self) -> None:
        """Write a checkpoint on request."""
        self._save()
        self._console.line(f"checkpoint: {self._where()}")

    def save_model(self) -> None:
        """Write the policy as a Hugging Face folder, replacing an older one; collective."""
        self._check_finite()
        self._world.pulse.beat("model folder")
        num_bytes = 2 * sum(map(prod, self._run.model.policy.shapes.values()))
        with self._console.writing("the trained model", num_bytes):
            self._writer.write(
                lambda: write_model(self._run.model, self._directory.model, self._add_card)
            )
        self._run_hook(self._directory.model)

    def _add_card(self, folder: Path) -> None:
        """A model is worth more than its card: what is wrong with the card is only told."""
        try:
            self._write_card(folder)
        except OSError:
            raise
        except Exception as error:
            self._console.notes([f"the model has no card: {type(error).__name__}: {error}"])

    def _run_hook(self, folder: Path) -> None:
        """Have ``checkpoint.on_save`` see a complete folder; tell where it fails."""
        if self._config.on_save is None:
            return
        output, pulse = self._directory.hook_output, self._world.pulse
        problem = broadcast(self._world, lambda: run_hook(self._config, folder, output, pulse.beat))
        if problem is not None:
            self._console.notes(
                [f"checkpoint.on_save {problem} (for {folder}; see {output}); the run goes on"]
            )

    def _save(self) -> None:
        boundary = self.boundary
        if boundary.step == self._on_disk or self._config.keep_last == 0:
            return
        self._check_finite()
        self._world.pulse.beat("checkpoint")
        content = snapshot(boundary, self._run, self._environment)
        folder = self._directory.checkpoints

        def write() -> None:
            with self._save_time.writing():
                write_checkpoint(folder, content, self._world)

        self._writer.write_on_first(lambda: sync_journals(self._directory))
        with self._console.writing(f"the checkpoint of step {boundary.step}", content.num_bytes):
            self._writer.write(write)
        self._console.notes(self._save_time.notes(boundary.step, content.num_bytes, folder))
        self._on_disk = boundary.step
        self._apply_retention()
        self._run_hook(folder / folder_name(boundary.step))

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
            if not self._config.keep_last:
                return "none, since checkpoint.keep_last is 0"
            done = self.boundary.step
            return f"none, after {done} steps" if done else "none, no step was finished"
        return str(self._directory.checkpoints / folder_name(self._on_disk))

    def _how(self) -> str:
        root = self._directory.root
        is_moved = root != self._run.config.output
        return f"--output {root} --resume" if is_moved else "--resume"
