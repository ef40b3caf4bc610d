"""The page of several runs: how their recipes differ, where they ended, and a curve of each run in
every chart.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isobit.observe.figures import ABSENT, Figures
from isobit.observe.report.chart import STEPS, Chart, Panel, draw_series
from isobit.observe.report.headline import state_of, tiles_of
from isobit.observe.report.panels import MOST_CURVES, Section, panels_of, section_of
from isobit.observe.report.series import PHASES, Curve, View, mean_of, minus, series_of
from isobit.observe.report.settings import flatten
from isobit.observe.report.templates import MARKER, render_page, write_page
from isobit.observe.run_record import RunRecord, read_run
from isobit.util.errors import ConfigError

MOST_RUNS = MOST_CURVES
COMPARISON = Path("comparison.html")
"""The page of several runs, by default."""

_SECONDS = "time/step_s"
_TIME = Panel("Time a step", "seconds", (Curve(_SECONDS, "seconds"),), "without evaluation")

Combination = Literal["overlay", "paired", "seeds"]
"""How several runs are drawn: a curve of each; the difference of each later run to the first, at
the steps that both have; or the mean over the runs whose recipes differ in seeds alone.
"""

Row = tuple[str, Sequence[tuple[str, str]]]
"""A row of a table: its name, and for each run a text and a detail in small print."""


def write_comparison(roots: Sequence[Path], out: Path) -> Path:
    """Write the page of two to seven runs; -> its path.

    Raises ConfigError for a directory that is no run's, for fewer or more of them, or where the
    page cannot be written.
    """
    if not 2 <= len(roots) <= MOST_RUNS:
        raise ConfigError(f"{len(roots)} runs cannot be compared; name 2 to {MOST_RUNS}")
    records = [read_run(root) for root in roots]
    names = [record.root.resolve().name for record in records]
    if len(set(names)) < len(names):
        names = [f"{place}: {record.root}" for place, record in enumerate(records, start=1)]
    page = render_page(
        "comparison.html",
        MARKER,
        name=" against ".join(names),
        names=names,
        refresh=0,
        sections=compare_sections(records, names),
        **describe_comparison(records),
    )
    return write_page(page, out, MARKER)


def describe_comparison(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The values above the charts: states, notes, last figures, and differences of recipes."""
    return {
        "states": [state_of(record) for record in records],
        "notes": notes_on(records),
        "ends": ends_of(records),
        "settings": differing_settings(records),
    }


def differing_settings(records: Sequence[RunRecord]) -> list[Row]:
    """The keys, but for ``output``, whose values differ between the runs."""
    tables = [dict(flatten(record.setting("config") or {})) for record in records]
    keys = dict.fromkeys(key for table in tables for key in table if key != "output")
    rows = [(key, [(table.get(key, ""), "") for table in tables]) for key in keys]
    return [(key, cells) for key, cells in rows if len(set(cells)) > 1]


def seed_groups(records: Sequence[RunRecord]) -> dict[frozenset[tuple[str, str]], list[int]]:
    """The places of the runs that have one recipe, but for seeds and ``output``, by recipe."""
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    for place, record in enumerate(records):
        rows = flatten(record.setting("config") or {})
        recipe = frozenset(
            row for row in rows if row[0].rpartition(".")[2] not in ("output", "seed")
        )
        groups.setdefault(recipe, []).append(place)
    return groups


def ends_of(records: Sequence[RunRecord]) -> list[Row]:
    """The figures at the top of each run's own page."""
    tables = [
        {tile.label: (tile.value, tile.detail) for tile in tiles_of(record)} for record in records
    ]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label, ("", "")) for table in tables]) for label in labels]


def notes_on(records: Sequence[RunRecord]) -> list[str]:
    """Warnings to a reader of the figures side by side."""
    keys = (key.split(".") for key, _ in differing_settings(records))
    differing = dict.fromkeys(".".join(key[:2]) for key in keys if key[0] == "reward")
    if not differing:
        return []
    return [
        f"These runs have different rewards ({', '.join(differing)}): their mean rewards are on "
        "different scales, and say nothing of which policy is better. Measure both with one "
        "reward: isobit eval RUN/model --data FILE --reward FUNCTION"
    ]


def compare_sections(
    records: Sequence[RunRecord],
    names: Sequence[str],
    how: Combination = "overlay",
    view: View = STEPS,
) -> list[Section]:
    """Each chart of a single run's page, for its first curve, with a curve of each run."""
    panels: dict[str, dict[str, Panel]] = {}
    for record in records:
        for title, several in panels_of(record).items():
            for panel in several:
                panels.setdefault(title, {}).setdefault(panel.title, panel)
    panels.setdefault("Speed", {})[_TIME.title] = _TIME
    figures = [_with_seconds(record.figures) for record in records]
    groups = [[place] for place in range(len(records))]
    if how == "seeds":
        groups = list(seed_groups(records).values())

    def chart(panel: Panel) -> Chart | None:
        curve = panel.curves[0]
        runs = [series_of(one, curve, view) for one in figures]
        if how == "paired":
            first = runs[0]
            rest = [first and series and minus(series, first) for series in runs[1:]]
            series = [None, *rest]
        else:
            several = [[one for place in group if (one := runs[place])] for group in groups]
            series = [mean_of(one) if len(one) > 1 else one[0] if one else None for one in several]
        labels = [", ".join(names[place] for place in group) for group in groups]
        return draw_series(_of_runs(panel, labels, how), series, view)

    sections = [
        section_of(title, list(map(chart, several.values()))) for title, several in panels.items()
    ]
    return [section for section in sections if section.charts or section.constants]


def _with_seconds(figures: Figures) -> Figures:
    phases = [figures.column(phase) for phase in PHASES]
    spent = np.sum([np.where(np.isfinite(phase), phase, 0.0) for phase in phases], axis=0)
    is_training = ~np.isnan(figures.column("time/training_s"))
    return figures.with_column(_SECONDS, np.where(is_training, spent, ABSENT))


def _of_runs(panel: Panel, labels: Sequence[str], how: Combination) -> Panel:
    first = panel.curves[0]
    unit = f"{panel.unit}, {first.label}" if len(panel.curves) > 1 else panel.unit
    note = panel.note
    if how == "paired":
        unit, note = f"{unit}, minus {labels[0]}" if unit else f"minus {labels[0]}", ""
    elif how == "seeds":
        note = "mean of the runs of one recipe; band: the lowest to the highest of them"
    curves = tuple(replace(first, label=label) for label in labels)
    return replace(panel, unit=unit, note=note, curves=curves, compared=True)
