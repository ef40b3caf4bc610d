"""What the report shows of a run: notices, charts, and the figures at the top of the page.

The charts are those of the table of metrics (``isobit.records.metrics``): a row that names a chart
is drawn there, in the section of its row.  A metric without a chart gets its own, in a section that
is folded.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isobit.config.rules import ONE_SAMPLE
from isobit.observe.report.chart import Chart, Curve, Panel, draw, duration_text, number_text
from isobit.observe.report.source import RunRecord
from isobit.records.metrics import METRICS, TABLE, Metric, chosen_name, find_metric
from isobit.records.text import REASONS_WITHOUT_SIGNAL, describe_reasons

TRUNCATED = 0.05
"""A larger share of the last step's completions at the length limit is a notice."""
LEVEL = 0.5
"""A larger share of zero-variance groups over all steps is a notice."""


def notices(record: RunRecord) -> Iterator[str]:
    """Sentences, the most serious first."""
    differing = record.total("log_prob_diff/tokens_differing")
    if differing and record.setting("precision", "exact"):
        yield (
            f"{differing:,.0f} log-probabilities differ between rollout and training, in a flow "
            "where none should: isobit verify --bisect names the place"
        )
    if failed := record.total("reward/failed"):
        yield (
            f"{failed:,.0f} rewards failed, and their completions were left out; the console says "
            "of each step which error came first"
        )
    if skipped := record.total("updates/skipped"):
        yield f"{skipped:,.0f} updates were skipped: loss or gradient norm was not finite"
    steps = [row for row in record.figures.values() if "updates/skipped" in row]
    if without_signal := record.total("updates/without_signal"):
        without = sum(row.get("updates/taken") == 0 for row in steps)
        reasons = {name: record.total(f"no_signal/{name}") for name in REASONS_WITHOUT_SIGNAL}
        why = f" ({describe_reasons(reasons, advise=True)})" if any(reasons.values()) else ""
        yield (
            f"{without_signal:,.0f} updates had nothing to learn from; no weight changed in "
            f"{without:,} of {len(steps):,} steps{why}"
        )
    shares = [v for row in steps if (v := row.get("reward/level_share")) is not None]
    compares = record.setting("config", "algorithm", "name") not in ONE_SAMPLE
    if compares and shares and (mean := sum(shares) / len(shares)) > LEVEL:
        yield (
            f"{100 * mean:.0f}% of all groups were level: no two of their rewards differ, and "
            "nothing is learnt from them; the problems are too easy or too hard for this model"
        )
    cut = record.values("response_length/truncated")
    if cut and cut[-1] > TRUNCATED:
        limit = record.setting("config", "rollout", "max_new_tokens")
        of_limit = f" of {limit} tokens" if isinstance(limit, int) else ""
        yield (
            f"{100 * cut[-1]:.0f}% of the last step's completions were cut off by the length limit"
            f"{of_limit} (rollout.max_new_tokens)"
        )
    yield from record.problems


MOST_OTHERS = 24
"""Charts of metrics that the table draws nowhere."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading."""

    title: str
    charts: tuple[Chart, ...]
    constants: tuple[Chart, ...] = ()
    """Of figures that never change, whose value is stated instead of drawn."""
    note: str = ""
    """What was left out."""
    folded: bool = False


def evaluation_sets(names: Sequence[str], figure: str = "accuracy") -> list[str]:
    """The evaluation sets that have ``figure`` among the names of figures."""
    pattern = re.compile(rf"eval/(?P<name>.+)/{figure}", re.DOTALL)
    return [found["name"] for name in names if (found := pattern.fullmatch(name))]


def build_sections(record: RunRecord) -> list[Section]:
    """The sections that have anything to show."""
    panels = panels_of(record)
    shown = {
        name
        for chosen in panels.values()
        for panel in chosen
        for curve in panel.curves
        for name in (curve.metric, *(curve.between or ()))
    }
    names = [name for name in record.names if name not in shown]
    others = [Panel(name, "", (Curve(name, name.rpartition("/")[2]),)) for name in names]
    left_out = len(names) - MOST_OTHERS
    note = f"{left_out} more figures are in metrics.jsonl only" if left_out > 0 else ""

    def drawn(panels: Sequence[Panel]) -> list[Chart | None]:
        return [draw(panel, record.figures) for panel in panels]

    found = [section_of(title, drawn(chosen)) for title, chosen in panels.items()]
    found.append(section_of("Other figures", drawn(others[:MOST_OTHERS]), note, folded=True))
    return [section for section in found if section.charts or section.constants]


def section_of(
    title: str, charts: Sequence[Chart | None], note: str = "", folded: bool = False
) -> Section:
    """The charts that there are, and those that never change apart."""
    moving = tuple(chart for chart in charts if chart and not chart.constant)
    constants = tuple(chart for chart in charts if chart and chart.constant)
    return Section(title, moving, constants, note, folded)


def panels_of(record: RunRecord) -> dict[str, list[Panel]]:
    """The charts that the table has for the metrics of a run, by the titles of their sections."""
    sections: dict[str, list[Panel]] = {title: [] for title in TABLE}
    found = [(row, name) for name in record.names if (row := find_metric(name)) is not None]
    for row, name in sorted(found, key=lambda pair: _ORDER[pair[0].name]):
        if row.chart and not name.endswith("/pass@1"):
            section = next(title for title, rows in TABLE.items() if row in rows)
            _add_curve(sections[section], record, row, name)
    rows = record.figures.values()
    if not any(row.get("log_prob_diff/tokens_compared") or "mismatch/k1" in row for row in rows):
        del sections["Rollout against training"]  # the figures of no comparison are zeros
    return sections


def _add_curve(panels: list[Panel], record: RunRecord, row: Metric, name: str) -> None:
    """Draw a metric in the panel of its title, which may exist already."""
    title = re.sub("SET|NAME", lambda _: chosen_name(name), row.chart)
    place = next((place for place, panel in enumerate(panels) if panel.title == title), None)
    curve = Curve(name, row.label or name.rpartition("/")[2], _TAKEN.get(row.reduce, "mean"))
    if place is not None:
        curves = (*panels[place].curves, curve)[:MOST_CURVES]
        note = panels[place].note if row.name.startswith("eval/") else ""
        panels[place] = replace(panels[place], curves=curves, note=note)
    elif row.name == "eval/SET/accuracy":
        percent = is_accuracy(record, chosen_name(name))
        sides = f"{name.removesuffix('accuracy')}low", f"{name.removesuffix('accuracy')}high"
        unit = "accuracy" if percent else "mean reward"
        curve = Curve(name, unit, between=sides)
        panels.append(
            Panel(title, unit, (curve,), "band or bar: 95% interval over problems", percent)
        )
    else:
        unit = "" if row.unit.startswith("-") else row.unit
        plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", row.help).replace("`", "")
        panels.append(Panel(title, unit, (curve,), plain, unit == "share"))


def is_accuracy(record: RunRecord, name: str) -> bool:
    """Whether every reward of an evaluation set was 0 or 1, so that their mean is an accuracy."""
    values = record.values(f"eval/{name}/accuracy")
    return f"eval/{name}/right" not in record.names and all(0 <= value <= 1 for value in values)


_ORDER = {name: place for place, name in enumerate(METRICS)}
_TAKEN: Mapping[str, Literal["max", "min"]] = {"max": "max", "min": "min", "sum": "max"}
"""What a point shows of several steps, if not the mean: no counted event is averaged away."""
MOST_CURVES = 7
"""The number of colours."""
_MOST_SETS = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the top of the page."""

    label: str
    value: str
    detail: str


def tiles_of(record: RunRecord) -> list[Tile]:
    """Losses of fine-tuning first, then evaluations, then the rest."""
    losses = evaluation_sets(record.names, "loss")[:_MOST_SETS]
    return [
        *(_change(record, name) for name in losses),
        *(_accuracy(record, name) for name in evaluation_sets(record.names)[:_MOST_SETS]),
        *_differing(record, "log_prob_diff", "log-probabilities"),
        *_differing(record, "routing_diff", "routings"),
        *_last(record),
        *_time(record),
    ]


def _change(record: RunRecord, name: str) -> Tile:
    values = record.values(f"eval/{name}/loss")
    if not values:
        return Tile(f"{name} loss", number_text(None), "no evaluation has a figure")
    before = "measured once" if len(values) == 1 else f"from {number_text(values[0])}"
    return Tile(f"{name} loss", number_text(values[-1]), before)


def _accuracy(record: RunRecord, name: str) -> Tile:
    rows = [row for row in record.figures.values() if row.get(f"eval/{name}/accuracy") is not None]
    if not rows:
        return Tile(f"{name} accuracy", number_text(None), "no evaluation has a figure")
    first, last = rows[0], rows[-1]
    before, after = (row[f"eval/{name}/accuracy"] or 0.0 for row in (first, last))
    percent = is_accuracy(record, name)
    low, high = (last.get(f"eval/{name}/{side}") for side in ("low", "high"))
    problems = last.get(f"eval/{name}/problems")
    parts = [] if len(rows) == 1 else [f"from {number_text(before, percent)}"]
    if low is not None and high is not None:
        parts.append(f"95% interval {number_text(low, percent)} to {number_text(high, percent)}")
    if not percent:
        right = last.get(f"eval/{name}/right", after if 0.0 <= after <= 1.0 else None)
        parts.append(f"{number_text(right, percent=True)} exactly right")
    if problems is not None:
        parts.append(f"{number_text(problems)} problems")
    label = f"{name} accuracy" if percent else f"{name} mean reward"
    return Tile(label, number_text(after, percent), "; ".join(parts))


def _differing(record: RunRecord, kind: str, noun: str) -> Iterator[Tile]:
    compared = record.total(f"{kind}/tokens_compared")
    differing = record.total(f"{kind}/tokens_differing")
    if compared:
        yield Tile(
            f"{noun} that differ",
            "0" if not differing else f"{100 * differing / compared:.3g}%",
            f"{differing:,.0f} of {compared:,.0f} in rollout and training",
        )


def _last(record: RunRecord) -> Iterator[Tile]:
    """The first and the last step's reward, or loss where there is none."""
    for metric, label in (("reward/mean", "training reward"), ("loss", "training loss")):
        if values := record.values(metric):
            detail = f"mean of the last step; {number_text(values[0])} in the first"
            yield Tile(label, number_text(values[-1]), detail)
            return


def _time(record: RunRecord) -> Iterator[Tile]:
    phases = {
        name: record.total(f"time/{name}_s")
        for name in ("rollout", "training", "grading", "evaluation")
    }
    if sum(phases.values()):
        parts = [
            f"{name} {duration_text(spent)}" for name, spent in phases.items() if spent >= 0.05
        ]
        yield Tile("time", duration_text(sum(phases.values())), ", ".join(parts))
