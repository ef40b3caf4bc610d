"""The arms of the proof as ordinary recipes of ``isobit train``, many side by side on one card, and
what each left.

    DIR/data            problems (``problems``)
    DIR/start           the fine-tuned model that all arms begin with
    DIR/runs/NAME       one run, NAME = TASK-ARM-SEED: a directory of ``isobit train --resume``
    DIR/rows            what is kept of the finished runs

A run is resumed from its last checkpoint until it is finished, so a sitting may end at any time.
All arms of a task and seed see the same prompts in the same order and sample by the same noise.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arms import rows
from benchmarks.arms.problems import Task

Changes = Mapping[str, str]
HERE = Path(__file__).parent
_TIS = '[{type = "tis", level = "token", max = 2.0}]'
_TRAINERS: Changes = {"precision": "fp8-rollout", "training.old_log_probs": "recomputed"}
ARMS: dict[str, Changes] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8-linear": {"precision": "fp8-linear"},
    "fp8-rollout": _TRAINERS,
    "fp8-rollout-tis": {**_TRAINERS, "corrections": _TIS},
    "fp8-fp32-scales": {"precision": '{preset = "fp8", scales = "fp32"}'},
}
LONG_ARMS = ("bf16", "fp8", "fp8-rollout", "fp8-rollout-tis")
"""Of ``multiply``, whose runs take longer."""
_GRACE_S = 60.0
"""From SIGTERM to a written checkpoint."""


@dataclass(frozen=True)
class Run:
    """One training."""

    task: Task
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Also of its files."""
        return f"{self.task}-{self.arm}-{self.seed}"


def wanted(task: Task, arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """All arms of a seed before the next seed, so that pairs are whole wherever a suite ends."""
    known = LONG_ARMS if task == "multiply" else ARMS
    return [Run(task, arm, seed) for seed in seeds for arm in arms if arm in known]


def command(run: Run, directory: Path, changes: Changes) -> list[str]:
    """``isobit train`` of a run, begun or resumed; ``changes`` come last."""
    data = directory / "data"
    settings = {
        "model": str(directory / "start" / "model"),
        "output": str(directory / "runs" / run.name),
        "seed": str(run.seed),
        "data.train.path": str(data / f"{run.task}.train.jsonl"),
        "data.eval.held_out.path": str(data / f"{run.task}.held_out.jsonl"),
        **ARMS[run.arm],
        **changes,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    recipe = str(HERE / f"{run.task}.toml")
    return [sys.executable, "-m", "isobit.cli.main", "train", recipe, "--resume", *words]


def run_all(
    runs: Sequence[Run], directory: Path, jobs: int, seconds: float, changes: Changes
) -> bool:
    """Go on with the runs, ``jobs`` at a time, for so many seconds; then those that run are told to
    write a checkpoint.  True where all are finished; a run that fails is said, and left.
    """
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not row_path(run, directory).exists()]
    live: dict[Run, subprocess.Popen[bytes]] = {}
    failed: list[Run] = []
    until = time.monotonic() + seconds
    while (left or live) and time.monotonic() < until:
        while left and len(live) < jobs:
            run = left.pop(0)
            live[run] = _start(run, directory, changes)
        time.sleep(1.0)
        for run in [run for run, process in live.items() if process.poll() is not None]:
            if live.pop(run).returncode == 0:
                keep(run, directory, jobs)
            else:
                failed.append(run)
                print(f"{run.name} failed: see {_log(run, directory)}", flush=True)
    for process in live.values():
        process.send_signal(signal.SIGTERM)
    for run, process in live.items():
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{run.name} wrote no checkpoint in {_GRACE_S:.0f} s", flush=True)
    return not (left or live or failed)


def _start(run: Run, directory: Path, changes: Changes) -> subprocess.Popen[bytes]:
    print(f"{run.name} begins or goes on", flush=True)
    with _log(run, directory).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 (this file)
            command(run, directory, changes),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _log(run: Run, directory: Path) -> Path:
    return directory / "runs" / f"{run.name}.log"


def row_path(run: Run, directory: Path) -> Path:
    """Of what is kept of a finished run."""
    return directory / "rows" / f"{run.name}{rows.SUFFIX}"


def keep(run: Run, directory: Path, jobs: int) -> None:
    """Write a finished run's row (``benchmarks.arms.rows``)."""
    who = {"task": run.task, "arm": run.arm, "seed": run.seed, "jobs": jobs}
    rows.write_row(row_path(run, directory), {**who, **rows.row_of(directory / "runs" / run.name)})
