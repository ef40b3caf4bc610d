"""The charts of a run, in sections.

The charts are those of the table of metrics (``isobit.records.metrics``): a row that names a chart
is drawn there, in the section of its row.  A metric without a chart gets its own, in a section that
is folded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isobit.observe.report.chart import STEPS, Chart, Panel, draw
from isobit.observe.report.series import Curve, View
from isobit.observe.run_record import RunRecord
from isobit.records.metrics import METRICS, TABLE, Metric, chosen_name, find_metric

MOST_OTHERS = 24
"""Charts of metrics that the table draws nowhere."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading."""

    title: str
    charts: tuple[Chart, ...]
    constants: tuple[Chart, ...] = ()
    """Charts of figures that never change, whose value is stated instead of drawn."""
    note: str = ""
    """A sentence on figures that were left out."""
    folded: bool = False


def build_sections(record: RunRecord, view: View = STEPS) -> list[Section]:
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
        return [draw(panel, record.figures, view) for panel in panels]

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
    if not record.total("log_prob_diff/tokens_compared") and "mismatch/k1" not in record.names:
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
        percent = record.is_accuracy(chosen_name(name))
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


_ORDER = {name: place for place, name in enumerate(METRICS)}
_TAKEN: Mapping[str, Literal["max", "min"]] = {"max": "max", "min": "min", "sum": "max"}
"""What a point shows of several steps, if not the mean: no counted event is averaged away."""
MOST_CURVES = 7
"""The number of colours."""
