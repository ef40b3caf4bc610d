"""The page of several runs: how their recipes differ, where they ended, and a curve of each run in
every chart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from isobit.observe.report.chart import Curve, Panel, draw
from isobit.observe.report.headline import state_of, tiles_of
from isobit.observe.report.panels import MOST_CURVES, Section, panels_of, section_of
from isobit.observe.report.settings import flatten
from isobit.observe.report.templates import MARKER, render_page, write_page
from isobit.observe.run_record import RunRecord, read_run
from isobit.util.errors import ConfigError

MOST_RUNS = MOST_CURVES
COMPARISON = Path("comparison.html")
"""Where the page of several runs is written by default."""

_SECONDS = "time/step_s"
_PHASES = ("time/rollout_s", "time/grading_s", "time/training_s")
_TIME = Panel("Time a step", "seconds", (Curve(_SECONDS, "seconds"),), "without evaluation")

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
        states=[state_of(record) for record in records],
        settings=differing_settings(records),
        ends=ends_of(records),
        notes=notes_on(records),
        sections=compare_sections(records, names),
    )
    return write_page(page, out, MARKER)


def differing_settings(records: Sequence[RunRecord]) -> list[Row]:
    """The keys, but for ``output``, whose values differ between the runs."""
    tables = [dict(flatten(record.setting("config") or {})) for record in records]
    keys = dict.fromkeys(key for table in tables for key in table if key != "output")
    rows = [(key, [(table.get(key, ""), "") for table in tables]) for key in keys]
    return [(key, cells) for key, cells in rows if len(set(cells)) > 1]


def ends_of(records: Sequence[RunRecord]) -> list[Row]:
    """The figures at the top of each run's own page."""
    tables = [
        {tile.label: (tile.value, tile.detail) for tile in tiles_of(record)} for record in records
    ]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label, ("", "")) for table in tables]) for label in labels]


def notes_on(records: Sequence[RunRecord]) -> list[str]:
    """What a reader of the figures side by side must know."""
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
    records: Sequence[RunRecord], names: Sequence[str], paired: bool = False
) -> list[Section]:
    """Each chart of a single run's page, for its first curve, with a curve of each run; ``paired``
    with the difference of each later run to the first, at the steps that both have.
    """
    figures: dict[int, dict[str, float | None]] = {}
    panels: dict[str, dict[str, Panel]] = {}
    for place, record in enumerate(records):
        for step, row in record.figures.items():
            figures.setdefault(step, {}).update(
                {f"{place}:{name}": value for name, value in _with_seconds(row).items()}
            )
        for title, found in panels_of(record).items():
            for panel in found:
                panels.setdefault(title, {}).setdefault(panel.title, panel)
    panels.setdefault("Speed", {})[_TIME.title] = _TIME
    figures = dict(sorted(figures.items()))
    if paired:
        figures = {step: _differences(row, len(records)) for step, row in figures.items()}
    drawn = [
        section_of(
            title, [draw(_of_all(panel, names, paired), figures) for panel in found.values()]
        )
        for title, found in panels.items()
    ]
    return [section for section in drawn if section.charts or section.constants]


def _with_seconds(row: Mapping[str, float | None]) -> dict[str, float | None]:
    spent = [row.get(phase) or 0.0 for phase in _PHASES if phase in row]
    return {**row, **({_SECONDS: sum(spent)} if "time/training_s" in row else {})}


def _differences(row: Mapping[str, float | None], runs: int) -> dict[str, float | None]:
    """Of a step, the figures of each later run minus those of the first, where both are known."""
    found: dict[str, float | None] = {}
    for name, value in row.items():
        place, _, metric = name.partition(":")
        first = row.get(f"0:{metric}")
        if 0 < int(place) < runs and value is not None and first is not None:
            found[name] = value - first
    return found


def _of_all(panel: Panel, names: Sequence[str], paired: bool) -> Panel:
    first = panel.curves[0]
    between = None if paired else first.between
    curves = [
        replace(
            first,
            metric=f"{place}:{first.metric}",
            label=name,
            between=between and (f"{place}:{between[0]}", f"{place}:{between[1]}"),
        )
        for place, name in enumerate(names)
    ]
    unit = f"{panel.unit}, {first.label}" if len(panel.curves) > 1 else panel.unit
    note = panel.note
    if paired:
        unit, note = f"{unit}, minus {names[0]}" if unit else f"minus {names[0]}", ""
    return replace(panel, unit=unit, note=note, curves=tuple(curves), compared=True)
