"""What the finished runs say: the held-out accuracy of each arm, and its differences to two others,
paired by seed and problem.

    d[s, p] = correct(arm, seed s, problem p) - correct(base, seed s, problem p)

Interval: 95% of the bootstrap that draws seeds, and problems within each, with replacement (the
arms of a seed stay together, so what seed and problem have in common cancels).  Accuracy is that of
the last evaluation, after the last step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from experiments.proof import cost
from experiments.proof import rows as rows_module
from experiments.proof.rows import Repeats, Row, name_of
from experiments.proof.suite import ARMS, SITES

BASES = "bf16", "fp8"
"""What arms are compared with: one function in BF16, and one in FP8, which samples as those do that
are two functions.
"""
DRAWS = 10_000
SEED = 0
LAST = 10
"""Steps whose mean reward is a run's last one."""
STRESS = "stress-"
"""How the names of tasks begin whose setting is harsher than the proof's."""
COLUMNS = (
    "seeds",
    "before",
    "after",
    "after, in another flow",
    *(f"minus {base}, points (95%)" for base in BASES),
    f"reward of the last {LAST} steps",
    "differing log-probabilities",
    "mean abs(d)",
    "exp(abs(d)), median step",
    "rollout alone, s a step",
    "training alone, s a step",
)


@dataclass(frozen=True, slots=True)
class Table:
    """The table of one task: a line for each arm, and the notes below it."""

    task: str
    lines: tuple[tuple[str, ...], ...]
    """The arm's name, then a cell a column of ``COLUMNS``."""
    notes: tuple[str, ...]


def tables(
    rows: Sequence[Row], again: Repeats | None = None, costs: cost.Costs | None = None
) -> list[Table]:
    """One a task, of whatever is finished; ``again`` are runs that were repeated."""
    twice, known = again or Repeats(), costs or {}
    return [_table(task, ours, twice, known.get(task, {})) for task, ours in by_task(rows).items()]


def markdown(found: Iterable[Table]) -> list[str]:
    lines: list[str] = []
    for table in found:
        lines += [
            f"| {' | '.join((table.task, *COLUMNS))} |",
            f"|---|{'---:|' * len(COLUMNS)}",
            *(f"| `{arm}` | {' | '.join(cells)} |" for arm, *cells in table.lines),
            "",
            *(line for note in table.notes for line in (note, "")),
        ]
    return lines


def by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The tasks of the proof first, then those of stress, each in order of its name; ``sites`` with
    the runs of ``multiply`` that they are compared with.
    """
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["task"].startswith(STRESS), row["task"])):
        found.setdefault(row["task"], []).append(row)
    if sites := found.get(SITES):
        seeds = {row["seed"] for row in sites}
        sites += [
            row for row in found.get("multiply", []) if row["arm"] in BASES and row["seed"] in seeds
        ]
    return found


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The arms that have rows, in the order of ``ARMS``, then others."""
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return {arm: ours for arm, ours in found.items() if ours}


def before(row: Row) -> list[float]:
    """The reward of each held-out problem, before the first step."""
    return _rewards(row, 0)


def after(row: Row) -> list[float]:
    return _rewards(row, -1)


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
    by_seed = {row["seed"]: after(row) for row in base}
    found = [
        torch.tensor(after(row)) - torch.tensor(by_seed[row["seed"]])
        for row in ours
        if row["seed"] in by_seed
    ]
    return torch.stack(found) if found else None


def mean_difference(rows: Iterable[Row], name: str) -> float | None:
    """A figure of ``log_prob_diff`` over all tokens compared, not all steps."""
    found = [
        (value, tokens)
        for row in rows
        for value, tokens in zip(
            row["steps"][name], row["steps"]["log_prob_diff/tokens_compared"], strict=True
        )
        if value is not None and tokens
    ]
    tokens = sum(count for _, count in found)
    return sum(value * count for value, count in found) / tokens if tokens else None


def _table(task: str, rows: Sequence[Row], again: Repeats, costs: Mapping[str, cost.Cost]) -> Table:
    arms = by_arm(rows)
    return Table(
        task,
        tuple((arm, *_cells(arm, arms), *_seconds(costs.get(arm))) for arm in arms),
        (*rows_module.repeat_notes(rows, again), *rows_module.setting_notes(rows)),
    )


def _cells(arm: str, arms: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    ours = arms[arm]
    yield str(len(ours))
    yield f"{fmean(fmean(before(row)) for row in ours):.1%}"
    yield f"{fmean(fmean(after(row)) for row in ours):.1%}"
    yield _elsewhere(ours)
    for place, base in enumerate(BASES):
        yield "-" if arm in BASES[: place + 1] else _points(ours, arms.get(base, []))
    yield _text(fmean(fmean(_known(row, "reward/mean")[-LAST:]) for row in ours), ".3f")
    yield differing(ours)
    yield _text(mean_difference(ours, "log_prob_diff/mean"), ".4g")
    yield _text(_median_of_steps(ours, "mismatch/mult_prob_error"), ".4f")


def _seconds(found: cost.Cost | None) -> Iterator[str]:
    for phase in cost.PHASES:
        yield _text(None if found is None else cost.seconds(found, phase), ".2f")


def _points(ours: Sequence[Row], base: Sequence[Row]) -> str:
    """Mean and interval, in percentage points."""
    difference = paired(ours, base)
    if difference is None:
        return "-"
    low, high = interval(difference)
    mean = 100 * float(difference.double().mean())
    pairs = "" if len(difference) == len(ours) else f", {len(difference)} of {len(ours)} seeds"
    return f"{mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}){pairs}"


def _elsewhere(rows: Iterable[Row]) -> str:
    """The mean accuracy of the last weights in the flow that is not their own, and its name."""
    found = [row["other_flow"] for row in rows if "other_flow" in row]
    if not found:
        return "-"
    accuracy = fmean(one["sets"]["held_out"]["accuracy"] for one in found)
    return f"{accuracy:.1%} ({found[0]['precision']['preset']})"


def differing(rows: Iterable[Row]) -> str:
    """Log-probabilities of rollout and training that differ, of those compared."""
    steps = [row["steps"] for row in rows]
    names = ("log_prob_diff/tokens_differing", "log_prob_diff/tokens_compared")
    found, compared = (sum(one or 0 for step in steps for one in step[name]) for name in names)
    return f"{found:,.0f} of {compared:,.0f}"


def _median_of_steps(rows: Iterable[Row], name: str) -> float | None:
    """One token can be the whole mean of exp(abs(d))."""
    found = [value for row in rows for value in _known(row, name)]
    return median(found) if found else None


def _known(row: Row, name: str) -> list[Any]:
    return [value for value in row["steps"][name] if value is not None]


def _rewards(row: Row, place: int) -> list[float]:
    """Raises ValueError where a reward failed: such a problem was neither solved nor missed."""
    rewards = row["evaluations"][place]["rewards"]
    if None in rewards:
        raise ValueError(
            f"{name_of(row)}: the reward of {rewards.count(None)} held-out problems failed in "
            f"evaluation {place}; see its rewards.jsonl, and make the run again"
        )
    return rewards


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
