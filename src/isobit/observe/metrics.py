"""The figures of a step, by the names the field uses, and where they are written:
``metrics.jsonl``, TensorBoard and a tracker.

Each figure is defined in ``docs/metrics.md``.

A line of ``metrics.jsonl`` is one object with ``step`` and the figures of that step or of the
evaluation after it; a figure that is not finite is null.  Every line is flushed when written.

Weights & Biases, for those who ask for it: the only file that imports its package, an extra
(``pip install wandb``).

A run keeps its id there in ``wandb_id`` in its directory, so that a resumed run goes on in the same
place; figures of steps that are repeated after a kill are already there, and wandb leaves them as
they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import uuid4

from isobit.algorithms.clipped import ClipBounds
from isobit.algorithms.ppo import explained_variance
from isobit.config.tables import TrackingConfig
from isobit.records.text import Group, json_line
from isobit.rewards.grading import GradeStats
from isobit.rollout.engine import EngineStats
from isobit.training.comparison import Comparison, Mismatch
from isobit.training.step import StepMetrics
from isobit.training.trainer import FORWARD, Repeat
from isobit.util.errors import ConfigError
from isobit.util.files import LineFile

if TYPE_CHECKING:
    from isobit.observe.events import Events


Metrics = dict[str, float]


class Tracker(Protocol):
    """A service that a run also sends its figures to."""

    def write(self, step: int, metrics: Metrics) -> None:
        """The figures of one step, or of the evaluation after it."""
        ...

    def close(self, failed: bool) -> None:
        """Nothing more comes; ``failed`` says whether the run ended early."""
        ...


_TRAINING_NAMES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "weight_bytes_changed": "weight_bytes_changed",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "ratio_min": "ratio/min",
    "clip_fraction_low": "clip_fraction/low",
    "clip_fraction_high": "clip_fraction/high",
    "clip_fraction_dual": "clip_fraction/dual",
    "kl_k1": "kl/k1",
    "kl_k3": "kl/k3",
    "value_loss": "value/loss",
    "value_clip_fraction": "value/clip_fraction",
}


def step_metrics(
    groups: Sequence[Group],
    grades: GradeStats,
    engine: EngineStats,
    trained: StepMetrics,
    seconds: Mapping[str, float],
) -> Metrics:
    """All figures of one step; ``seconds`` holds those of rollout, grading and training."""
    scalars = trained.scalars()
    return {
        **reward_metrics(groups),
        "reward/failed": grades.failed,
        "reward/counted": sum(grades.counts.values()),
        "reward/level_groups": trained.level_groups,
        "reward/level_share": trained.level_groups / trained.groups,
        **length_metrics(groups),
        **{name: scalars[key] for key, name in _TRAINING_NAMES.items() if key in scalars},
        **{name: value for name, value in scalars.items() if name.startswith("router/")},
        **value_metrics(scalars),
        **clip_metrics(trained.clip),
        "updates/taken": len(trained.updates) - trained.skipped_updates,
        "updates/skipped": trained.skipped_updates,
        "updates/without_signal": trained.without_signal,
        "log_prob_diff/mean": trained.comparison.mean_abs_diff,
        "log_prob_diff/max": trained.comparison.max_abs_diff,
        "log_prob_diff/tokens_compared": trained.comparison.tokens_compared,
        "log_prob_diff/tokens_differing": trained.comparison.tokens_differing,
        **routing_metrics(trained.comparison),
        **mismatch_metrics(trained.mismatch),
        **repeat_metrics(trained.repeat),
        **{f"correction/{name}": value for name, value in trained.corrections.items()},
        "replay/samples": trained.replayed_samples,
        "staleness/mean": trained.staleness,
        "rollout/preemptions": engine.preemptions,
        "rollout/shared_pages": engine.shared_pages,
        "rollout/chunks": engine.chunks,
        **{f"time/{name}_s": value for name, value in seconds.items()},
        **rate("rollout", engine.generated_tokens, seconds["rollout"]),
        **rate("training", trained.tokens, seconds["training"]),
    }


def rate(phase: str, tokens: int, seconds: float) -> Metrics:
    """Tokens a second; nothing where there were none."""
    return {f"tokens_per_s/{phase}": tokens / seconds} if tokens and seconds else {}


def reward_metrics(groups: Sequence[Group]) -> Metrics:
    """Mean and standard deviation of the rewards that did not fail, and of each of several parts by
    name; nothing where all did.
    """
    names = groups[0].reward_parts if groups else ()
    columns = {f"reward/{name}": [group.reward_parts[name] for group in groups] for name in names}
    columns["reward"] = [group.rewards for group in groups]
    figures: Metrics = {}
    for name, column in columns.items():
        if rewards := [reward for group in column for reward in group if reward is not None]:
            figures |= {f"{name}/mean": fmean(rewards), f"{name}/std": pstdev(rewards)}
    return figures


def length_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths of the completions in tokens, and the share that the length limit ended."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.length for completion in completions]
    return {
        "response_length/mean": fmean(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated": fmean(
            completion.finish_reason == "length" for completion in completions
        ),
    }


def routing_metrics(comparison: Comparison) -> Metrics:
    """Tokens whose experts differ between rollout and training; nothing without experts."""
    if not comparison.routings_compared:
        return {}
    return {
        "routing_diff/tokens_compared": comparison.routings_compared,
        "routing_diff/tokens_differing": comparison.routings_differing,
    }


def mismatch_metrics(mismatch: Mismatch | None) -> Metrics:
    """How far trainer and sampler are apart; nothing where no token was compared."""
    if mismatch is None:
        return {}
    figures = mismatch.figures()
    return {
        "log_prob_diff/p99": figures.pop("p99_abs_diff"),
        **{f"mismatch/{name}": value for name, value in figures.items()},
    }


def repeat_metrics(repeat: Repeat | None) -> Metrics:
    """How many gradients of the micro-batch that was computed twice had other bits; nothing where
    none was.
    """
    if repeat is None:
        return {}
    return {
        "check/gradients_repeated": repeat.gradients,
        "check/gradients_differing": len(set(repeat.differing) - {FORWARD}),
        "check/forwards_differing": int(FORWARD in repeat.differing),
    }


def value_metrics(scalars: Mapping[str, float]) -> Metrics:
    """How much of the returns' variance a value head explains; nothing without one, or where all
    returns are equal.
    """
    if "return_square" not in scalars:
        return {}
    explained = explained_variance(scalars)
    return {} if explained is None else {"value/explained_variance": explained}


def clip_metrics(bounds: ClipBounds | None) -> Metrics:
    """The bounds that a calibrated clip has; nothing where they stay as configured."""
    return {} if bounds is None else {"clip/low": bounds.clip_low, "clip/high": bounds.clip_high}


class MetricsWriter:
    """Appends figures to ``metrics.jsonl`` and a TensorBoard folder, and sends them to a tracker if
    there is one; a context manager.

    Without the package tensorboard, which ``say`` is told, there are no events.
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
        """What writes one line, and one event a figure, each flushed; what has raised StorageError
        may be called again.
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
