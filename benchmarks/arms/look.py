"""How far the runs of a proof are, finished or not: a line a run."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.arms.rows import steps_of
from isobit.store.directory import whole_lines

_TEN = 10


def look(directory: Path) -> Iterator[str]:
    """Of each run in DIR/runs: steps, held-out accuracy by step, the mean reward of each ten steps,
    seconds a step, and how many log-probabilities differ.
    """
    for path in sorted((directory / "runs").glob("*/metrics.jsonl")):
        yield f"{path.parent.name}: {_described(list(map(json.loads, whole_lines(path, 0))))}"


def _described(lines: list[dict[str, Any]]) -> str:
    steps = steps_of(lines)
    accuracy = "eval/held_out/accuracy"
    held_out = [f"{line['step']}: {line[accuracy]:.1%}" for line in lines if accuracy in line]
    if not steps:
        return f"no step yet; held out {', '.join(held_out) or 'not measured'}"
    rewards = [line["reward/mean"] for line in steps]
    tens = [f"{fmean(rewards[at : at + _TEN]):.3f}" for at in range(0, len(rewards), _TEN)]
    seconds = [median(line[f"time/{name}_s"] for line in steps) for name in ("rollout", "training")]
    differing, compared = (
        sum(line.get(f"log_prob_diff/tokens_{name}") or 0 for line in steps)
        for name in ("differing", "compared")
    )
    return (
        f"{len(steps)} steps; held out {', '.join(held_out)}; reward {' '.join(tens)}; "
        f"rollout {seconds[0]:.2f} s, training {seconds[1]:.2f} s; "
        f"{differing:,.0f} of {compared:,.0f} differ"
    )
