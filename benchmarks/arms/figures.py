"""What the finished runs say: the held-out accuracy of each arm, and its difference to another arm,
paired by seed and problem.

    d[s, p] = correct(arm, seed s, problem p) - correct(base, seed s, problem p)

Interval: 95% of the bootstrap that draws seeds, and problems within each, with replacement (the
arms of a seed stay together, so what seed and problem have in common cancels).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.arms.runs import ARMS

Row = Mapping[str, Any]
DRAWS = 10_000
SEED = 0


def read_finished(directory: Path) -> list[Row]:
    """The rows of a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def interval(difference: torch.Tensor) -> tuple[float, float]:
    """[seeds, problems] -> the 95% interval of its mean."""
    seeds, problems = difference.shape
    generator = torch.Generator().manual_seed(SEED)
    means = torch.empty(DRAWS, dtype=torch.float64)
    for draw in range(DRAWS):
        chosen = torch.randint(seeds, (seeds, 1), generator=generator)
        of_each = torch.randint(problems, (seeds, problems), generator=generator)
        means[draw] = difference[chosen, of_each].mean(dtype=torch.float64)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def paired(ours: Iterable[Row], base: Iterable[Row]) -> torch.Tensor | None:
    """Differences [seeds, problems] of the seeds that both have, after the last step."""
    by_seed = {row["seed"]: row["after"] for row in base}
    found = [
        torch.tensor(row["after"]) - torch.tensor(by_seed[row["seed"]])
        for row in ours
        if row["seed"] in by_seed
    ]
    return torch.stack(found) if found else None


def table(rows: Sequence[Row], base: str = "bf16") -> list[str]:
    """A Markdown table for each task, of whatever is finished."""
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        lines += [
            f"| {task} | seeds | before | after | minus {base}, points | differing | "
            "rollout s | training s |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        of_task = {arm: [r for r in rows if (r["task"], r["arm"]) == (task, arm)] for arm in ARMS}
        lines += [line(arm, ours, of_task[base]) for arm, ours in of_task.items() if ours]
        lines.append("")
    return lines


def line(arm: str, ours: Sequence[Row], base: Sequence[Row]) -> str:
    """One arm's."""
    difference = None if ours[0]["arm"] == base[0]["arm"] else paired(ours, base)
    cells = [
        f"`{arm}`",
        str(len(ours)),
        f"{fmean(fmean(row['before']) for row in ours):.1%}",
        f"{fmean(fmean(row['after']) for row in ours):.1%}",
        "-" if difference is None else points(difference),
        differing(ours),
        *(f"{_median_seconds(ours, name):.2f}" for name in ("rollout", "training")),
    ]
    return f"| {' | '.join(cells)} |"


def points(difference: torch.Tensor) -> str:
    """Mean and interval, in percentage points."""
    low, high = interval(difference)
    mean = 100 * float(difference.double().mean())
    return f"{mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def differing(rows: Iterable[Row]) -> str:
    """Log-probabilities of rollout and training that differ, of those compared."""
    steps = [line for row in rows for line in row["metrics"]]
    names = ("log_prob_diff/tokens_differing", "log_prob_diff/tokens_compared")
    found, compared = (sum(line.get(name) or 0 for line in steps) for name in names)
    return f"{found:,.0f} of {compared:,.0f}"


def _median_seconds(rows: Iterable[Row], phase: str) -> float:
    """Of a step, the first one aside, which compiles."""
    name = f"time/{phase}_s"
    found = [
        line[name] for row in rows for line in row["metrics"] if line["step"] > 1 and name in line
    ]
    return float(torch.tensor(found, dtype=torch.float64).median()) if found else float("nan")
