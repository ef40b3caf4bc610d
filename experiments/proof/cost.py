"""What a step of each arm takes alone on a card, rollout and training apart.

Some arms of a task begin side by side, in ``DIR/cost``.  Each is stopped (SIGSTOP) when its first
step is done, which compiles and captures, and goes on when all are and its turn has come, until it
has been measured; the step in which it was stopped is not counted.  So each has the card for
itself, but for its memory.  Beginning takes longer than measuring, hence side by side.

    ROWS/cost.json      task -> arm -> seconds of each step: rollout, training; and the device
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from experiments.proof import runs
from experiments.proof.rows import steps_of
from experiments.proof.suite import Changes, Run
from isobit.store.directory import write_json
from isobit.store.journals import whole_lines

Cost: TypeAlias = Mapping[str, Any]
Costs: TypeAlias = Mapping[str, Mapping[str, Cost]]
FILE = "cost.json"
PHASES = "rollout", "training"
STEPS = 8
"""Steps that are counted."""
AT_ONCE = 3
"""Arms that begin side by side.  Six of 443 million parameters filled a card of 141 GiB: torch gave
memory back and asked again in every step, and training took two to three times as long.
"""
_FEW: Changes = {"data.eval.held_out.limit": "8", "checkpoint.keep_last": "0"}
_POLL_S = 0.02


def measure_all(
    wanted: Sequence[Run],
    directory: Path,
    card: str,
    steps: int,
    changes: Changes,
    at_once: int = AT_ONCE,
) -> None:
    """Add the runs' figures to DIR/rows/cost.json.  Raises RuntimeError where one ends before it is
    measured; its log says why.
    """
    for first in range(0, len(wanted), at_once):
        _measure(wanted[first : first + at_once], directory, card, steps, changes)


def _measure(
    wanted: Sequence[Run], directory: Path, card: str, steps: int, changes: Changes
) -> None:
    place = directory / "cost"
    shutil.rmtree(place, ignore_errors=True)
    (place / "runs").mkdir(parents=True)
    for name in {"data", *(run.start for run in wanted)}:
        (place / name).symlink_to((directory / name).resolve())
    live = {
        run: runs.on_card(
            card, runs.training_command(run, place, {**_FEW, **changes}), runs.log_path(run, place)
        )
        for run in wanted
    }
    try:
        _stop_after_first(live, place)
        for run, process in live.items():
            process.send_signal(signal.SIGCONT)
            while len(found := _steps(run, place)) < 2 + steps:
                _check(run, process, place)
                time.sleep(_POLL_S)
            process.send_signal(signal.SIGSTOP)
            _add(directory / "rows", run, found[2:], _device(run, place))
    finally:
        for process in live.values():
            process.kill()
            process.wait()
    shutil.rmtree(place)


def read(folder: Path) -> Costs:
    """The costs that were measured beside these rows."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def seconds(found: Cost, phase: str) -> float:
    """The median seconds of a step."""
    return median(found[phase])


def markdown(costs: Costs) -> Iterator[str]:
    """A line an arm, and its ratio to ``bf16``."""
    for task, arms in costs.items():
        yield f"| {task} | rollout, s a step | training, s a step | both | of `bf16` |"
        yield "|---|---:|---:|---:|---:|"
        base = sum(seconds(arms["bf16"], phase) for phase in PHASES) if "bf16" in arms else None
        for arm, found in arms.items():
            rollout, training = (seconds(found, phase) for phase in PHASES)
            both = rollout + training
            ratio = f"{both / base:.2f}" if base else "-"
            yield f"| `{arm}` | {rollout:.2f} | {training:.2f} | {both:.2f} | {ratio} |"
        yield ""


def _stop_after_first(live: Mapping[Run, subprocess.Popen[bytes]], place: Path) -> None:
    running = dict(live)
    while running:
        for run, process in list(running.items()):
            _check(run, process, place)
            if _steps(run, place):
                process.send_signal(signal.SIGSTOP)
                del running[run]
        time.sleep(_POLL_S)


def _check(run: Run, process: subprocess.Popen[bytes], place: Path) -> None:
    if process.poll() is not None:
        log = runs.log_path(run, place)
        raise RuntimeError(f"{run.name} ended before it was measured: see {log}")


def _steps(run: Run, place: Path) -> list[dict[str, Any]]:
    path = place / "runs" / run.name / "metrics.jsonl"
    return steps_of(map(json.loads, whole_lines(path, 0)))


def _device(run: Run, place: Path) -> dict[str, Any]:
    text = (place / "runs" / run.name / "run.json").read_text(encoding="utf-8")
    return json.loads(text)["device"]


def _add(folder: Path, run: Run, steps: Sequence[Mapping[str, Any]], device: object) -> None:
    known = read(folder)
    found = {phase: [line[f"time/{phase}_s"] for line in steps] for phase in PHASES}
    arms = {**known.get(run.task, {}), run.arm: {**found, "device": device}}
    folder.mkdir(exist_ok=True)
    write_json(folder / FILE, {**known, run.task: arms})
