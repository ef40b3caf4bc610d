"""What a run achieved, in one record: the last lines on the console and ``summary.json`` are both
made from it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isobit.store.directory import write_json


@dataclass(frozen=True, slots=True)
class SetSummary:
    """One evaluation set before and after the run; accuracies are mean rewards, intervals cover
    95%.
    """

    problems: int
    accuracy_before: float
    accuracy_after: float
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The most that a phase took of a GPU's memory."""

    planned_gib: float
    peak_gib: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What every finished training has."""

    directory: Path
    preset: str
    steps: int
    gpu_memory: Mapping[str, PhaseMemory] | None = field(default=None, kw_only=True)
    """By phase, rollout and training, of this process; None on a CPU."""

    @property
    def model(self) -> Path:
        """The trained policy, as a Hugging Face folder."""
        return self.directory / "model"

    def as_json(self) -> dict[str, Any]:
        """The record with paths as text."""
        return {**asdict(self), "directory": str(self.directory), "model": str(self.model)}

    def describe_memory(self) -> list[str]:
        """A line a phase; none on a CPU."""
        return [
            f"GPU memory in {phase}: {memory.peak_gib:.1f} GiB at most, {memory.planned_gib:.1f} "
            "planned"
            for phase, memory in (self.gpu_memory or {}).items()
        ]

    def write(self, path: Path) -> None:
        """Write ``summary.json``."""
        write_json(path, self.as_json())


@dataclass(frozen=True, slots=True)
class Summary(RunSummary):
    """The figures of a finished run.  The accuracies and ``problems`` on top are those of the first
    evaluation set, None without one.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    problems: int
    tokens_compared: int
    """Response tokens whose recorded log-probability was compared with the trainer's, bit for
    bit.
    """
    tokens_differing: int
    max_abs_diff: float
    tokens_generated: int
    skipped_updates: int
    failed_rewards: int
    train_seconds: float
    """Wall seconds of the steps: rollout, grading and training, without evaluation and loading."""
    rollout_seconds: float
    evaluation_seconds: float
    evaluations: Mapping[str, SetSummary]
