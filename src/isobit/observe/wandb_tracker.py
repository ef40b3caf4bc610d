"""Weights & Biases, for those who ask for it: the only file that imports its package, an extra
(``pip install wandb``).

A run keeps its id there in ``wandb_id`` in its directory, so that a resumed run goes on in the same
place; figures of steps that are repeated after a kill are already there, and wandb leaves them as
they are.
"""

from pathlib import Path
from typing import Any
from uuid import uuid4

from isobit.config.tracking import TrackingConfig
from isobit.errors import ConfigError
from isobit.observe.metrics import Metrics, Tracker

DEFAULT_PROJECT = "isobit"


def check_package(tracking: TrackingConfig) -> None:
    """Refuse a tracker whose package is missing, without a word to anybody.  Raises ConfigError."""
    if tracking.wandb is not False:
        _package()


def check_tracking(tracking: TrackingConfig) -> None:
    """Refuse, before anything is loaded or written, a tracker whose package is missing or that
    nobody is logged in to.

    Raises ConfigError.  On a terminal wandb asks for the key; with WANDB_MODE=offline it needs
    none.
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
    return WandbTracker(
        DEFAULT_PROJECT if tracking.wandb is True else tracking.wandb, root, settings
    )


class WandbTracker:
    """One run of a project at Weights & Biases (a ``Tracker``)."""

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
        """Figures of one step; a second call for the same step adds to the first."""
        self._run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        """Wait until all figures have been sent, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))


def _refusal(error: Exception) -> ConfigError:
    reason = str(error).rstrip(".")
    return ConfigError(
        f"tracking.wandb is set, but Weights & Biases cannot start ({reason}): run `wandb login`, "
        "set WANDB_MODE=offline, or leave "
        "tracking.wandb out"
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
    """The id that this run has at Weights & Biases: a new one the first time."""
    if not path.exists():
        path.write_text(uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")
