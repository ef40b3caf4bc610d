"""Writes the metrics of a run to ``metrics.jsonl``, TensorBoard and Weights & Biases.

A line of ``metrics.jsonl`` is one object with ``step`` and the metrics of that step, or of the
evaluation after it; one that is not finite is null.  Every line is flushed when it is written.  The
names are those of ``isobit.records.metrics``.

This is the only module that imports wandb, an extra (``pip install wandb``).  A run's directory
keeps the wandb id of the run in ``wandb_id``, so that a resumed run continues there; wandb ignores
the metrics of steps that are repeated after a kill.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import uuid4

from isobit.config.tables import TrackingConfig
from isobit.records.metrics import Metrics
from isobit.records.text import json_line
from isobit.util.errors import ConfigError
from isobit.util.files import LineFile

if TYPE_CHECKING:
    from isobit.observe.events import Events


class Tracker(Protocol):
    """A service that a run also sends its metrics to."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of one step, or of the evaluation after it."""
        ...

    def close(self, failed: bool) -> None:
        """Nothing more is sent; ``failed`` says whether the run ended early."""
        ...


class MetricsWriter:
    """Appends metrics to ``metrics.jsonl`` and a TensorBoard folder, and sends them to a tracker if
    there is one; a context manager.  Without the package tensorboard, ``say`` prints a note.
    """

    def __init__(
        self,
        jsonl: Path,
        tensorboard: Path,
        tracker: Tracker | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._tracker = tracker
        self._lines = LineFile(jsonl)
        self._events = _open_events(tensorboard, say)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()
        if self._tracker is not None:
            self._tracker.close(failed=error is not None)

    def writes(self, step: int, metrics: Metrics) -> list[Callable[[], None]]:
        """The calls that write the line, the events and to the tracker; each flushes, and one that
        raised StorageError may be called again.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        made: list[Callable[[], None]] = [
            partial(self._lines.write, json_line({"step": step, **finite}))
        ]
        if self._events is not None:
            made.append(partial(self._events.write, step, metrics))
        if self._tracker is not None:
            made.append(partial(self._tracker.write, step, metrics))
        return made


def _open_events(folder: Path, say: Callable[[str], None]) -> "Events | None":
    try:
        from isobit.observe.events import Events
    except ImportError:
        say(
            "note: the package tensorboard is not installed: no events are written; metrics.jsonl "
            "has every figure"
        )
        return None
    return Events(folder)


DEFAULT_PROJECT = "isobit"


def check_package(tracking: TrackingConfig) -> None:
    """Raise ConfigError for a tracker whose package is missing; contacts no service."""
    if tracking.wandb is not False:
        _package()


def check_tracking(tracking: TrackingConfig) -> None:
    """Raise ConfigError, before anything is loaded or written, for a tracker whose package or login
    is missing.  On a terminal wandb asks for the key; with WANDB_MODE=offline it needs none.
    """
    if tracking.wandb is not False:
        wandb = _package()
        try:
            wandb.login()
        except Exception as error:  # its own classes of error differ from version to version
            raise _refusal(error) from error


def open_tracker(tracking: TrackingConfig, root: Path, settings: dict[str, Any]) -> Tracker | None:
    """The tracker that ``tracking`` asks for, or None.  ``settings`` is the resolved configuration.

    Raises ConfigError where Weights & Biases cannot be started.
    """
    if tracking.wandb is False:
        return None
    project = DEFAULT_PROJECT if tracking.wandb is True else tracking.wandb
    return WandbTracker(project, root, settings)


class WandbTracker:
    """A run of a project at Weights & Biases."""

    def __init__(self, project: str, root: Path, settings: dict[str, Any]) -> None:
        wandb = _package()
        try:
            self._run = wandb.init(
                project=project,
                name=root.resolve().name,
                id=_run_id(root / "wandb_id"),
                resume="allow",
                dir=str(root),
                config=settings,
            )
        except Exception as error:  # see above
            raise _refusal(error) from error

    def write(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; a second call for the same step adds to the first."""
        self._run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        """Wait until all figures have been sent, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))


def _refusal(error: Exception) -> ConfigError:
    reason = str(error).rstrip(".")
    return ConfigError(
        f"tracking.wandb is set, but Weights & Biases cannot start ({reason}): run `wandb login`, "
        "set WANDB_MODE=offline, or leave tracking.wandb out"
    )


def _package() -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ConfigError(
            "tracking.wandb is set, but the package wandb is not installed: pip install wandb, "
            "or leave tracking.wandb out"
        ) from error
    return wandb


def _run_id(path: Path) -> str:
    """The id of this run at Weights & Biases, created the first time."""
    if not path.exists():
        path.write_text(uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")
