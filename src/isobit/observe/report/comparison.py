"""Several runs on one page: what of their recipes differs, where they ended, and each figure of all
of them in one chart.

A chart has the first curve of the panel that a page of one run has (``panels``), once for each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import isobit
from isobit.errors import ConfigError
from isobit.observe.report.chart import Panel, draw
from isobit.observe.report.page import MARKER, state_of
from isobit.observe.report.panels import Section, panels_of, section_of
from isobit.observe.report.series import Curve
from isobit.observe.report.settings import flatten
from isobit.observe.report.source import RunRecord, read_run
from isobit.observe.report.template import render_template, write_page
from isobit.observe.report.tiles import tiles_of

MOST_RUNS = 7
"""As many as there are colours."""

_SECONDS = "time/step_s"
_PHASES = ("time/rollout_s", "time/grading_s", "time/training_s")
_TIME = Panel("Time a step", "seconds", (Curve(_SECONDS, "seconds"),), "without evaluation")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: what it is of, and for each run a text and what is said small beside it."""

    name: str
    cells: tuple[tuple[str, str], ...]


def write_comparison(roots: Sequence[Path], out: Path) -> Path:
    """Write the page of two to seven runs; -> where it is.

    Raises ConfigError for a directory that is no run's, for fewer or more of them, or where the
    page cannot be written.
    """
    if not 2 <= len(roots) <= MOST_RUNS:
        raise ConfigError(f"{len(roots)} runs cannot be compared; name 2 to {MOST_RUNS}")
    return write_page(render_comparison([read_run(root) for root in roots]), out, MARKER)


def render_comparison(records: Sequence[RunRecord]) -> str:
    """The page as text."""
    names = _names(records)
    page = render_template(
        "comparison.html",
        name=" against ".join(names),
        names=names,
        refresh=0,
        states=[state_of(record) for record in records],
        settings=_settings(records),
        ends=_ends(records),
        sections=_sections(records, names),
        version=isobit.__version__,
    )
    return f"{MARKER}\n{page}\n"


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Of the directories, whole paths where two have the same."""
    names = [record.root.resolve().name for record in records]
    if len(set(names)) == len(names):
        return names
    return [f"{place}: {record.root}" for place, record in enumerate(records, start=1)]


def _settings(records: Sequence[RunRecord]) -> list[Row]:
    """Keys whose values are not the same in all runs, but for their directories."""
    tables = [dict(flatten(record.setting("config") or {})) for record in records]
    keys = dict.fromkeys(key for table in tables for key in table if key != "output")
    rows = [Row(key, tuple((table.get(key, ""), "") for table in tables)) for key in keys]
    return [row for row in rows if len(set(row.cells)) > 1]


def _ends(records: Sequence[RunRecord]) -> list[Row]:
    """The figures on top of each run's own page."""
    tables = [{tile.label: tile for tile in tiles_of(record)} for record in records]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [
        Row(
            label,
            tuple(
                (tile.value, tile.detail) if (tile := table.get(label)) else ("", "")
                for table in tables
            ),
        )
        for label in labels
    ]


def _sections(records: Sequence[RunRecord], names: Sequence[str]) -> list[Section]:
    figures = _joined(records)
    panels: dict[str, dict[str, Panel]] = {}
    for record in records:
        for title, found in panels_of(record).items():
            for panel in found:
                if not panel.stacked:
                    panels.setdefault(title, {}).setdefault(panel.title, panel)
    panels.setdefault("Speed", {})[_TIME.title] = _TIME
    drawn = [
        section_of(
            title,
            [
                chart
                for panel in found.values()
                if (chart := draw(_of_all(panel, names), figures)) is not None
            ],
        )
        for title, found in panels.items()
    ]
    return [section for section in drawn if section.charts or section.constants]


def _of_all(panel: Panel, names: Sequence[str]) -> Panel:
    first = panel.curves[0]
    several = len(panel.curves) > 1
    curves = [
        replace(
            first,
            metric=f"{place}:{first.metric}",
            label=name,
            spread=None if first.spread is None else f"{place}:{first.spread}",
            between=None
            if first.between is None
            else (f"{place}:{first.between[0]}", f"{place}:{first.between[1]}"),
        )
        for place, name in enumerate(names)
    ]
    unit = f"{panel.unit}, {first.label}" if several else panel.unit
    return replace(panel, unit=unit, curves=tuple(curves), compared=True)


def _joined(records: Sequence[RunRecord]) -> dict[int, dict[str, float | None]]:
    """The figures of all runs by step, each name with its run's place before it."""
    found: dict[int, dict[str, float | None]] = {}
    for place, record in enumerate(records):
        for step, row in record.figures.items():
            spent = [row.get(phase) or 0.0 for phase in _PHASES if phase in row]
            figures = {**row, _SECONDS: sum(spent)} if "time/training_s" in row else row
            found.setdefault(step, {}).update(
                {f"{place}:{name}": value for name, value in figures.items()}
            )
    return dict(sorted(found.items()))
