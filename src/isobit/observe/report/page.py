"""The page of a run, or of several: put through the templates and written as a whole.

A page stands for itself: HTML without scripts and without anything to load.  Text from prompts,
completions, configurations and file names is escaped by the template engine, never by hand;
characters that are invisible or could change the direction of the text are replaced by visible ones
before that.

The page of a run under way is written again and again until the run ends.  A page of several runs
says in what their recipes differ and where they ended, and has each chart of a single run's page
(its first curve) once, with a curve for each run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

import isobit
from isobit.observe.report.chart import Curve, Panel, draw
from isobit.observe.report.panels import (
    Section,
    build_sections,
    notices,
    panels_of,
    section_of,
    tiles_of,
)
from isobit.observe.report.samples import SHADES, choose_samples, view_flow
from isobit.observe.report.source import RunRecord, flatten, read_run, view_settings
from isobit.util.errors import ConfigError


def render_template(template: str | Path, /, **values: Any) -> str:
    """A template with everything that it needs: by its file's name, or a file elsewhere that may
    include these.
    """
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    if isinstance(template, Path):
        made = environment.from_string(template.read_text(encoding="utf-8"))
    else:
        made = environment.get_template(template)
    return made.render(**values)


def write_page(page: str, path: Path, marker: str) -> Path:
    """Write a page as a whole; -> where it is.  An older one, which begins with ``marker``, is
    replaced.

    Raises ConfigError where another file is, or where it cannot be written.
    """
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(
            marker
        ):
            raise ConfigError(
                f"{str(path)!r} is there already and no report; name another file (--out FILE)"
            )
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}); name another file (--out FILE)"
        ) from error
    return path


def _source(name: str) -> str | None:
    path = files("isobit.observe.report").joinpath(name)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def visible(text: str) -> str:
    """``text`` with pictures in the place of control characters, and code points in the place of
    other invisible ones.
    """
    return "".join(
        character if character in "\t\n" or character.isprintable() else _picture(ord(character))
        for character in text
    )


def _picture(code: int) -> str:
    return (
        chr(0x2400 + code)
        if code < 0x20
        else "\N{SYMBOL FOR DELETE}"
        if code == 0x7F
        else f"[U+{code:04X}]"
    )


def _finalize(value: Any) -> Any:
    """What the template puts out for a value; markup that it made itself passes as it is."""
    return visible(value) if type(value) is str else value


MARKER = "<!doctype html>\n<!-- isobit report -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""

REFRESH_S = 10
"""Between two writings of the page of a run under way, and two readings of it by a browser."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its directory as ``report.html``; -> where it is.

    Raises ConfigError for a directory that is no run's, or where the page cannot be written.
    """
    return write_page(render(read_run(root)), out or root / "report.html", MARKER)


def render(record: RunRecord, refresh: bool = False) -> str:
    """The page as text; with ``refresh`` a browser reads it again every ``REFRESH_S`` seconds."""
    page = render_template(
        "report.html",
        record=record,
        name=record.root.resolve().name,
        state=state_of(record),
        stopped=_stopped(record),
        refresh=REFRESH_S if refresh else 0,
        started=str(record.setting("started") or "").replace("T", " ").replace("+00:00", " UTC"),
        notices=notices(record),
        tiles=tiles_of(record),
        sections=build_sections(record),
        flow=view_flow(record),
        sources=choose_samples(record.completions),
        shades=SHADES,
        settings=view_settings(record.setting("config")),
        environment=list(
            flatten(
                {
                    key: record.setting(key)
                    for key in ("started", "device", "versions", "model", "data")
                }
            )
        ),
        version=isobit.__version__,
    )
    return f"{MARKER}\n{page}\n"


def state_of(record: RunRecord) -> str:
    """How far it is, and whether it goes on."""
    steps = record.setting("config", "training", "steps")
    done = max(
        (
            step
            for step, row in record.figures.items()
            if any(not name.startswith(("eval/", "time/")) for name in row)
        ),
        default=0,
    )
    of = f"{done} of {steps} steps" if isinstance(steps, int) else f"{done} steps"
    if record.finished:
        return f"finished, {of}"
    if record.is_running:
        return f"running: {of} so far"
    if record.ending:
        return f"stopped early: {of}"
    return f"not finished (stopped, or running elsewhere): {of} so far"


def _stopped(record: RunRecord) -> str:
    """Why it ended before its time, and where it can go on; empty where it did not."""
    if record.finished or record.is_running or not record.ending:
        return ""
    reason, checkpoint = record.ending.get("reason"), record.ending.get("checkpoint")
    text = f"Stopped early: {reason or record.ending.get('kind') or 'nobody said why'}"
    return f"{text}. Last checkpoint: step {checkpoint}" if checkpoint else text


def watch_run(
    root: Path, out: Path | None = None, pause: Callable[[float], None] = time.sleep
) -> Path:
    """Write the page every ``REFRESH_S`` seconds while the run is going, and once more at its end,
    when it no longer reads itself again; -> where it is.  Raises as ``write_report`` does.
    """
    while (record := read_run(root)).is_running and not record.finished:
        write_page(render(record, refresh=True), out or root / "report.html", MARKER)
        pause(REFRESH_S)
    return write_report(root, out)


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


COMPARISON = Path("comparison.html")
"""Where the page of several runs is written unless something else is said."""


def report(
    run: str | Path, *others: str | Path, out: str | Path | None = None, watch: bool = False
) -> Path:
    """Write the page of a run's directory, by default there as ``report.html``; of several runs, up
    to seven, a page that compares them, by default ``comparison.html``; -> where it is.

    With ``watch`` the page of a run under way is written again every ten seconds until it ends.
    Raises ConfigError for a directory that is no run's, or a file that cannot be written.
    """
    place = None if out is None else Path(out)
    if others:
        if watch:
            raise ConfigError("--watch shows one run; leave it out to compare several")
        return write_comparison([Path(run), *map(Path, others)], place or COMPARISON)
    return watch_run(Path(run), place) if watch else write_report(Path(run), place)
