"""The figures on top of the page."""

from collections.abc import Iterator
from dataclasses import dataclass

from isobit.observe.report.axis import duration_text, number_text
from isobit.observe.report.notices import total
from isobit.observe.report.panels import evaluation_sets
from isobit.observe.report.source import RunRecord

_MOST_SETS = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure on top of the page."""

    label: str
    value: str
    detail: str


def tiles_of(record: RunRecord) -> list[Tile]:
    """Losses first where examples are learnt, then what evaluations found, then the rest."""
    losses = evaluation_sets(record.names, "loss")[:_MOST_SETS]
    return [
        *(_change(record, f"eval/{name}/loss", f"{name} loss") for name in losses),
        *(_accuracy(record, name) for name in evaluation_sets(record.names)[:_MOST_SETS]),
        *_differing(record, "log_prob_diff", "log-probabilities"),
        *_differing(record, "routing_diff", "routings"),
        *_last(record),
        *_time(record),
    ]


def _change(record: RunRecord, metric: str, label: str) -> Tile:
    values = [value for row in record.figures.values() if (value := row.get(metric)) is not None]
    if not values:
        return Tile(label, number_text(None), "no evaluation has a figure")
    before = "measured once" if len(values) == 1 else f"from {number_text(values[0])}"
    return Tile(label, number_text(values[-1]), before)


def _accuracy(record: RunRecord, name: str) -> Tile:
    rows = [row for row in record.figures.values() if row.get(f"eval/{name}/accuracy") is not None]
    if not rows:
        return Tile(f"{name} accuracy", number_text(None), "no evaluation has a figure")
    first, last = rows[0], rows[-1]
    accuracy = [row[f"eval/{name}/accuracy"] or 0.0 for row in (first, last)]
    percent = all(0.0 <= value <= 1.0 for value in accuracy)
    low, high = (last.get(f"eval/{name}/{side}") for side in ("low", "high"))
    problems = last.get(f"eval/{name}/problems")
    parts = [
        "" if len(rows) == 1 else f"from {number_text(accuracy[0], percent)}",
        f"95% interval {number_text(low, percent)} to {number_text(high, percent)}"
        if low is not None and high is not None
        else "",
        "" if problems is None else f"{number_text(problems)} problems",
    ]
    return Tile(
        f"{name} accuracy" if percent else f"{name} mean reward",
        number_text(accuracy[1], percent),
        "; ".join(part for part in parts if part),
    )


def _differing(record: RunRecord, kind: str, noun: str) -> Iterator[Tile]:
    compared = total(record, f"{kind}/tokens_compared")
    differing = total(record, f"{kind}/tokens_differing")
    if compared:
        yield Tile(
            f"{noun} that differ",
            "0" if not differing else f"{100 * differing / compared:.3g}%",
            f"{differing:,.0f} of {compared:,.0f} in rollout and training",
        )


def _last(record: RunRecord) -> Iterator[Tile]:
    """The first and the last step's reward, or loss where there is none."""
    for metric, label in (("reward/mean", "training reward"), ("loss", "training loss")):
        values = [v for row in record.figures.values() if (v := row.get(metric)) is not None]
        if values:
            detail = f"mean of the last step; {number_text(values[0])} in the first"
            yield Tile(label, number_text(values[-1]), detail)
            return


def _time(record: RunRecord) -> Iterator[Tile]:
    phases = {
        name: total(record, f"time/{name}_s")
        for name in ("rollout", "training", "grading", "evaluation")
    }
    if sum(phases.values()):
        parts = [
            f"{name} {duration_text(spent)}" for name, spent in phases.items() if spent >= 0.05
        ]
        yield Tile("time", duration_text(sum(phases.values())), ", ".join(parts))
