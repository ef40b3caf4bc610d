"""What the report says of a run: notices, charts and the figures on top of the page.

The charts are those of the table of metrics (``isobit.records.metrics``): a row that names a chart
is drawn there, in the section of its row.  A metric that names none, or that the table lacks, gets
a chart of its own among the others, folded away.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isobit.observe.report.chart import Chart, Curve, Panel, draw, duration_text, number_text
from isobit.observe.report.source import RunRecord
from isobit.records.metrics import METRICS, TABLE, Metric, chosen_name, find_metric

TRUNCATED = 0.05
"""Share of the last step's completions that the length limit may end without a word."""
LEVEL = 0.5
"""Share of level groups over all steps from which they are named."""


def notices(record: RunRecord) -> list[str]:
    """A sentence each, the gravest first."""
    return [*_differing_notice(record), *_counts(record), *_last_step(record), *record.problems]


def total(record: RunRecord, metric: str) -> float:
    """The sum of a figure over all steps."""
    return sum(row.get(metric) or 0.0 for row in record.figures.values())


def _differing_notice(record: RunRecord) -> Iterator[str]:
    differing = total(record, "log_prob_diff/tokens_differing")
    if differing and record.setting("precision", "exact"):
        yield (
            f"{differing:,.0f} log-probabilities differ between rollout and training, in a flow "
            "where none should: isobit verify --bisect names the place"
        )


def _counts(record: RunRecord) -> Iterator[str]:
    steps = [row for row in record.figures.values() if "updates/skipped" in row]
    without = sum(row.get("updates/taken") == 0 for row in steps)
    if failed := total(record, "reward/failed"):
        yield (
            f"{failed:,.0f} rewards failed, and their completions were left out; the console says "
            "of each step which error came first"
        )
    if skipped := total(record, "updates/skipped"):
        yield f"{skipped:,.0f} updates were skipped: loss or gradient norm was not finite"
    if without_signal := total(record, "updates/without_signal"):
        yield (
            f"{without_signal:,.0f} updates had nothing to learn from, since all rewards of each "
            f"prompt were equal; no weight changed in {without:,} of {len(steps):,} steps"
        )
    shares = [v for row in steps if (v := row.get("reward/level_share")) is not None]
    if shares and (mean := sum(shares) / len(shares)) > LEVEL:
        yield (
            f"{100 * mean:.0f}% of all groups were level: no two of their rewards differ, and "
            "nothing is learnt from them; the problems are too easy or too hard for this model"
        )


def _last_step(record: RunRecord) -> Iterator[str]:
    rows = [row for row in record.figures.values() if "response_length/truncated" in row]
    cut = (rows[-1].get("response_length/truncated") or 0.0) if rows else 0.0
    if cut > TRUNCATED:
        limit = record.setting("config", "rollout", "max_new_tokens")
        yield (
            f"{100 * cut:.0f}% of the last step's completions were cut off by the length limit"
            + (f" of {limit} tokens" if isinstance(limit, int) else "")
            + " (rollout.max_new_tokens)"
        )


MOST_OTHERS = 24
"""Charts of metrics that no chart of the table has."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading; ``note`` says what was left out."""

    title: str
    charts: tuple[Chart, ...]
    constants: tuple[Chart, ...] = ()
    """Of figures that never change: their one value is said instead of drawn."""
    note: str = ""
    folded: bool = False
    """Whether it is shown on demand only."""


def evaluation_sets(names: Sequence[str], figure: str = "accuracy") -> list[str]:
    """The evaluation sets that have ``figure`` among the names of figures."""
    pattern = re.compile(rf"eval/(?P<name>.+)/{figure}", re.DOTALL)
    return [found["name"] for name in names if (found := pattern.fullmatch(name))]


def build_sections(record: RunRecord) -> list[Section]:
    """The sections that have anything to show."""
    panels = panels_of(record)
    sections = [section_of(title, _draw(record, chosen)) for title, chosen in panels.items()]
    found = [*sections, _others(record, panels)]
    return [section for section in found if section.charts or section.constants]


def panels_of(record: RunRecord) -> dict[str, list[Panel]]:
    """The charts that the table has for the metrics of a run, by the titles of their sections."""
    sections: dict[str, list[Panel]] = {title: [] for title in TABLE}
    found = [(row, name) for name in record.names if (row := find_metric(name)) is not None]
    for row, name in sorted(found, key=lambda pair: _ORDER[pair[0].name]):
        if row.chart and not name.endswith("/pass@1"):
            section = next(title for title, rows in TABLE.items() if row in rows)
            _add_curve(sections[section], record, row, name)
    if not _compares(record):
        del sections["Rollout against training"]
    return sections


def _add_curve(panels: list[Panel], record: RunRecord, row: Metric, name: str) -> None:
    """Draw a metric in the panel of its title, which may be there already."""
    title = re.sub("SET|NAME", lambda _: chosen_name(name), row.chart)
    place = next((place for place, panel in enumerate(panels) if panel.title == title), None)
    curve = Curve(name, row.label or name.rpartition("/")[2], _TAKEN.get(row.reduce, "mean"))
    if place is not None:
        curves = (*panels[place].curves, curve)[:MOST_CURVES]
        note = panels[place].note if row.name.startswith("eval/") else ""
        panels[place] = replace(panels[place], curves=curves, note=note)
    elif row.name == "eval/SET/accuracy":
        panels.append(_accuracy_panel(record, title, name))
    else:
        unit = "" if row.unit.startswith("-") else row.unit
        panels.append(Panel(title, unit, (curve,), _plain(row.help), unit == "share"))


_ORDER = {name: place for place, name in enumerate(METRICS)}
_TAKEN: Mapping[str, Literal["max", "min"]] = {"max": "max", "min": "min", "sum": "max"}
"""What a point shows of several steps, where that is not their mean: nothing counted disappears."""
MOST_CURVES = 7
"""As many as there are colours."""


def _accuracy_panel(record: RunRecord, title: str, name: str) -> Panel:
    values = [value for row in record.figures.values() if (value := row.get(name)) is not None]
    percent = all(0.0 <= value <= 1.0 for value in values)
    sides = f"{name.removesuffix('accuracy')}low", f"{name.removesuffix('accuracy')}high"
    unit, note = "accuracy" if percent else "mean reward", "band: 95% interval over problems"
    return Panel(title, unit, (Curve(name, "accuracy", between=sides),), note, percent)


def _plain(text: str) -> str:
    """Markdown without its links and code marks."""
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).replace("`", "")


def _compares(record: RunRecord) -> bool:
    """Whether any log-probability was compared: the figures of none are zeros that say nothing."""
    rows = record.figures.values()
    return any(row.get("log_prob_diff/tokens_compared") or "mismatch/k1" in row for row in rows)


def section_of(
    title: str, charts: Sequence[Chart], note: str = "", folded: bool = False
) -> Section:
    """Charts under a heading; of those that never change, the values."""
    moving = tuple(chart for chart in charts if not chart.constant)
    constants = tuple(chart for chart in charts if chart.constant)
    return Section(title, moving, constants, note, folded)


def _draw(record: RunRecord, panels: Sequence[Panel]) -> tuple[Chart, ...]:
    return tuple(chart for panel in panels if (chart := draw(panel, record.figures)) is not None)


def _others(record: RunRecord, panels: Mapping[str, Sequence[Panel]]) -> Section:
    """A chart for every metric that has none yet."""
    shown = {
        name
        for chosen in panels.values()
        for panel in chosen
        for curve in panel.curves
        for name in (curve.metric, *(curve.between or ()))
    }
    names = [name for name in record.names if name not in shown]
    charts = _draw(
        record,
        [Panel(name, "", (Curve(name, name.rpartition("/")[2]),)) for name in names[:MOST_OTHERS]],
    )
    left_out = len(names) - MOST_OTHERS
    note = f"{left_out} more figures are in metrics.jsonl only" if left_out > 0 else ""
    return section_of("Other figures", charts, note, folded=True)


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
