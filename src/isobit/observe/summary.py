"""What a run achieved, in one record: the last lines on the console and ``summary.json`` are both
made from it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isobit.memory.turns import PhaseMemory
from isobit.store.directory import write_json


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What every finished training has to say, whatever it learnt from."""

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
            f"device memory in {phase}: {memory.peak_gib:.1f} GiB at most, "
            f"{memory.planned_gib:.1f} planned"
            for phase, memory in (self.gpu_memory or {}).items()
        ]

    def write(self, path: Path) -> None:
        """Write the record as ``summary.json``."""
        write_json(path, self.as_json())
