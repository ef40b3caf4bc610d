"""The directory of a run: where each file lies, and the refusal of one that is already used.

    run.json            manifest: versions, machine, resolved configuration, precision graph
    metrics.jsonl       one JSON object a step
    tensorboard/        the same figures as TensorBoard events
    completions.jsonl   a few graded completions of each step and evaluation
    rewards.jsonl       every reward that the run was given
    budget.jsonl        changes of the tokens a micro-batch after an out-of-memory; there only if
                        one came
    checkpoints/        the whole state after some of the steps: ``step_000010``, ..
                        (``isobit.store.checkpoint``)
    model/              the trained policy as a Hugging Face folder, with its tokenizer
    summary.json        the figures at the end
    ending.json         why the run has ended before its time, until it goes on

A run writes into a directory that holds anything only to go on in it (``--resume``): two runs would
mix their metrics.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.errors import ConfigError

LOCK_FILE = ".lock"
_BEFORE_A_RUN = {LOCK_FILE, ".run.json.partial"}


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's files."""

    root: Path

    @property
    def manifest(self) -> Path:
        """``run.json``: what is needed to understand or repeat the run."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``: the figures of each step and evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's events: the figures of ``metrics.jsonl``."""
        return self.root / "tensorboard"

    @property
    def completions(self) -> Path:
        """``completions.jsonl``: a few graded completions of each step and evaluation."""
        return self.root / "completions.jsonl"

    @property
    def rewards(self) -> Path:
        """``rewards.jsonl``: every reward that the run was given."""
        return self.root / "rewards.jsonl"

    @property
    def budget(self) -> Path:
        """``budget.jsonl``: changes of the tokens a micro-batch after an out-of-memory."""
        return self.root / "budget.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, from which the run can be resumed."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.root / "model"

    @property
    def summary(self) -> Path:
        """``summary.json``: the figures at the end, written last."""
        return self.root / "summary.json"

    @property
    def ending(self) -> Path:
        """``ending.json``: why the run has ended before its time; only then, until it goes on."""
        return self.root / "ending.json"


def check_unused(root: Path) -> None:
    """Refuse a path that a run cannot have to itself: a file, a directory with anything in it, or a
    place that is not writable.

    Writes nothing.  Raises ConfigError naming the path and the ways out.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"output is {str(root)!r}, which is a file; name a directory that is new or empty"
        )
    if not is_empty(root):
        is_run = (root / "run.json").exists()
        raise ConfigError(
            f"output is {str(root)!r}, which already holds files{' of a run' if is_run else ''}; "
            "name another directory (--output PATH), "
            f"{'go on with that run (--resume), ' if is_run else ''}move this one away, or remove "
            f"it (rm -r {root})"
        )
    above = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output is {str(root)!r}, but nothing can be written in {str(above)!r}; name another "
            "directory (--output PATH)"
        )


def is_empty(root: Path) -> bool:
    """Whether a path holds nothing, or only what a process leaves that was killed before its run
    had begun.
    """
    return not root.is_dir() or all(path.name in _BEFORE_A_RUN for path in root.iterdir())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as a whole: a reader sees the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)
