"""The arms of the proof as ordinary recipes of ``isobit train``, many side by side on one card, and
what each left.

    DIR/data            problems (``problems``)
    DIR/start           the fine-tuned model that all arms begin with
    DIR/outliers        the same function, with activation outliers, for one setting under stress
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
from benchmarks.arms.problems import TASKS

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
FEW_ARMS = ("bf16", "fp8", "fp8-rollout", "fp8-rollout-tis")
"""Of ``multiply``, whose runs take longer, and of the settings under stress."""
OUTLIERS = "stress-outliers"
"""Begins with the start in which outliers are planted (``benchmarks.arms.outliers``)."""
STRESSES: dict[str, Changes] = {
    "stress-rate": {"training.learning_rate": "1e-4"},
    "stress-updates": {"training.learning_rate": "3e-5", "training.updates_per_batch": "4"},
    "stress-hot": {"training.learning_rate": "3e-5", "rollout.temperature": "1.3"},
    OUTLIERS: {},
}
"""``gsm`` in settings that are said to make a mismatch of rollout and training worse."""
NAMES = (*TASKS, *STRESSES)
"""Of all tasks, for a run."""
_GRACE_S = 60.0
"""From SIGTERM to a written checkpoint."""


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    """One of ``NAMES``."""
    arm: str
    seed: int

    @property
    def problems(self) -> str:
        """What it is trained and measured on: the task of a setting under stress is ``gsm``."""
        return "gsm" if self.task in STRESSES else self.task

    @property
    def name(self) -> str:
        """Also of its files."""
        return f"{self.task}-{self.arm}-{self.seed}"


def wanted(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """All arms of a seed before the next seed, so that pairs are whole wherever a suite ends."""
    return [
        Run(task, arm, seed)
        for seed in seeds
        for task in tasks
        for arm in arms
        if task == "gsm" or arm in FEW_ARMS
    ]


def start_of(task: str, directory: Path) -> Path:
    """Where the model is that the runs of a task begin with."""
    return directory / ("outliers" if task == OUTLIERS else "start")


def command(run: Run, directory: Path, changes: Changes) -> list[str]:
    """``isobit train`` of a run, begun or resumed; ``changes`` come last."""
    data = directory / "data"
    settings = {
        "model": str(start_of(run.task, directory) / "model"),
        "output": str(directory / "runs" / run.name),
        "seed": str(run.seed),
        "data.train.path": str(data / f"{run.problems}.train.jsonl"),
        "data.eval.held_out.path": str(data / f"{run.problems}.held_out.jsonl"),
        **STRESSES.get(run.task, {}),
        **ARMS[run.arm],
        **changes,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    recipe = str(HERE / f"{run.problems}.toml")
    return [sys.executable, "-m", "isobit.cli.main", "train", recipe, "--resume", *words]


def run_all(
    runs: Sequence[Run],
    directory: Path,
    cards: Sequence[str],
    jobs: int,
    seconds: float,
    changes: Changes,
) -> bool:
    """Go on with the runs, ``jobs`` at a time on each of the cards (``CUDA_VISIBLE_DEVICES``), for
    so many seconds; then those that run are told to write a checkpoint.  True where all are
    finished; a run that fails is said, and left.
    """
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not row_path(run, directory).exists()]
    live: list[Live] = []
    free = list(cards) * jobs
    are_kept = True
    until = time.monotonic() + seconds
    while (left or live) and time.monotonic() < until:
        while left and free:
            live.append(_start(left.pop(0), directory, changes, free.pop(0)))
        time.sleep(1.0)
        for one in [one for one in live if one.process.poll() is not None]:
            live.remove(one)
            free.append(one.card)
            are_kept &= _keep_if_finished(one, directory, jobs)
    _stop(live)
    return are_kept and not (left or live)


@dataclass(frozen=True)
class Live:
    """A run that goes on."""

    run: Run
    card: str
    process: subprocess.Popen[bytes]


def _start(run: Run, directory: Path, changes: Changes, card: str) -> Live:
    print(f"{run.name} begins or goes on, on card {card}", flush=True)
    with _log(run, directory).open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 (this file)
            command(run, directory, changes),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": card},
        )
    return Live(run, card, process)


def _keep_if_finished(ended: Live, directory: Path, jobs: int) -> bool:
    if ended.process.returncode != 0:
        print(f"{ended.run.name} failed: see {_log(ended.run, directory)}", flush=True)
        return False
    try:
        keep(ended.run, directory, jobs)
    except (OSError, ValueError) as error:  # the others go on
        print(f"{ended.run.name} is finished, but no row could be made of it: {error}", flush=True)
        return False
    return True


def _stop(live: Sequence[Live]) -> None:
    for one in live:
        one.process.send_signal(signal.SIGTERM)
    for one in live:
        try:
            one.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            print(f"{one.run.name} wrote no checkpoint in {_GRACE_S:.0f} s", flush=True)


def _log(run: Run, directory: Path) -> Path:
    return directory / "runs" / f"{run.name}.log"


def row_path(run: Run, directory: Path) -> Path:
    """Of what is kept of a finished run."""
    return directory / "rows" / f"{run.name}{rows.SUFFIX}"


def keep(run: Run, directory: Path, jobs: int) -> None:
    """Write a finished run's row (``benchmarks.arms.rows``)."""
    who = {"task": run.task, "arm": run.arm, "seed": run.seed, "jobs": jobs}
    rows.write_row(row_path(run, directory), {**who, **rows.row_of(directory / "runs" / run.name)})
