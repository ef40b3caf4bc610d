"""Writes the checkpoints of a run when they are due, and when the run ends before its time.

Due is one every n steps, after the last step, and where an evaluation was the best so far
(``keep_best``); none with ``keep_last = 0``. Before its time, a run ends by

    SIGTERM, Ctrl-C     the last moment between two steps is written, if it is not on the disk
                        already
    an error            the same, and the policy as a model folder, as far as either can still be
                        written
    a second Ctrl-C     nothing is written: the process may be in the middle of anything

All ranks write a checkpoint together.  So of several processes nothing is written after an error
that only one rank knows of: the others are still waiting for it in the middle of something, and the
launcher ends them.  Errors that all have agreed on, signals too, are as good as one process's
(``isobit.parallel.agreement.is_agreed``).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from types import TracebackType
from typing import Protocol, Self

from isobit.errors import Interrupted, StorageError
from isobit.files import disk_errors
from isobit.models.loaded import write_model
from isobit.parallel.agreement import is_agreed
from isobit.parallel.writing import write_by_first
from isobit.store.checkpoint.format import folder_name, write_checkpoint
from isobit.store.checkpoint.retention import apply_retention, worth
from isobit.store.checkpoint.start import Start
from isobit.store.checkpoint.state import Boundary, holds, snapshot
from isobit.store.journal import sync_journals
from isobit.store.training_run import TrainingRun


class KeepsBoundary(Protocol):
    """The log of a training: it knows the last moment between two steps."""

    @property
    def boundary(self) -> Boundary:
        """All that a checkpoint of that moment holds beside the tensors."""
        ...

    def evaluation_figures(self) -> Mapping[int, Mapping[str, float]]:
        """The figures of every evaluation so far, by step."""
        ...


class Announces(Protocol):
    """Where lines are printed."""

    def line(self, text: str = "") -> None:
        """Print one line."""
        ...

    def writing(self, what: str, num_bytes: int) -> AbstractContextManager[None]:
        """A block in which ``what`` is written."""
        ...


class CheckpointKeeper:
    """Entered for the steps of a run; with ``model_when_interrupted`` a signal leaves the policy as
    a model folder, too.
    """

    def __init__(
        self,
        run: TrainingRun,
        start: Start,
        log: KeepsBoundary,
        console: Announces,
        model_when_interrupted: bool = False,
    ) -> None:
        self._run, self._log, self._console = run, log, console
        self._config = run.config.checkpoint
        self._model_when_interrupted = model_when_interrupted
        self._directory, self._world = start.directory, start.world
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
        if isinstance(error, (Interrupted, Exception)) and not self._all_end(error):
            return
        if isinstance(error, Interrupted):
            self._save_what_stands()
            if self._model_when_interrupted:
                self._save_last_weights()
            self._console.line(f"checkpoint: {self._where()}; go on with --resume")
        elif isinstance(error, Exception):
            try:
                self._save_what_stands()
                self._save_last_weights()
            except StorageError as second:
                self._console.line(f"stopped early, and no more could be saved: {second}")
            self._console.line(
                f"checkpoint: {self._where()}; once the cause is gone, go on with --resume"
            )

    def _all_end(self, error: BaseException) -> bool:
        """Whether every rank has come here, so that all can save together."""
        if self._world.size == 1 or is_agreed(error):
            return True
        self._console.line(
            f"not all ranks can save; checkpoint: {self._where()}; once the cause is gone, go on "
            "with --resume"
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

    def save_model(self) -> None:
        """The policy as a Hugging Face folder; an older one is replaced as a whole.  All ranks
        together.
        """
        self._world.pulse.beat("model folder")
        num_bytes = 2 * sum(map(prod, self._run.model.policy.shapes.values()))
        with self._console.writing("the trained model", num_bytes):
            write_model(self._run.model, self._directory.model)

    def _save_last_weights(self) -> None:
        if all(self._world.messages(self._run.trainer.is_whole)):
            self.save_model()
            self._console.line(
                f"stopped early: the weights of the last update are in {self._directory.model}"
            )

    def _save_what_stands(self) -> None:
        if all(self._world.messages(holds(self._log.boundary, self._run))):
            self._save()

    def _save(self) -> None:
        boundary = self._log.boundary
        if boundary.step == self._on_disk or self._config.keep_last == 0:
            return
        self._world.pulse.beat("checkpoint")
        content = snapshot(boundary, self._run)
        self._by_first(lambda: sync_journals(self._directory))
        with self._console.writing(f"the checkpoint of step {boundary.step}", content.num_bytes):
            write_checkpoint(self._directory.checkpoints, content, self._world)
        self._on_disk = boundary.step
        self._apply_retention()

    def _apply_retention(self) -> None:
        self._by_first(lambda: apply_retention(self._directory.checkpoints, self._config))

    def _by_first(self, attempt: Callable[[], None]) -> None:
        def first() -> None:
            with disk_errors(self._directory.root, "the files of the run"):
                attempt()

        write_by_first(self._world, first)

    def _is_best(self, step: int) -> bool:
        name = self._config.keep_best
        if name is None:
            return False
        worths = {
            done: worth(figures, name)
            for done, figures in self._log.evaluation_figures().items()
            if done > 0
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
