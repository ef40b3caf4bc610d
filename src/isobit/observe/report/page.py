"""Writes the page of a run or of several: HTML without scripts, and without anything to load.

Text from prompts, completions, configurations and file names is escaped by the template engine,
never by hand, and invisible characters, some of which change the direction of text, are replaced by
visible ones.

The page of a run under way is written again until the run ends.  A page of several runs shows how
their recipes differ, where they ended, and a curve of each run in every chart.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

import isobit
from isobit.observe.report.chart import Curve, Panel, draw
from isobit.observe.report.panels import (
    MOST_CURVES,
    Section,
    build_sections,
    notices,
    panels_of,
    section_of,
    tiles_of,
)
from isobit.observe.report.source import (
    SHADES,
    RunRecord,
    choose_samples,
    flatten,
    read_run,
    view_flow,
    view_settings,
)
from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain


def render_page(template: str | Path, marker: str, /, **values: Any) -> str:
    """``marker`` and a template with its values.  A template is named, or a file elsewhere, which
    may include those that have names.
    """
    return f"{marker}\n{fill(template, **values)}\n"


def fill(template: str | Path, /, **values: Any) -> str:
    """A template with its values, every text of which is escaped."""

    def source(name: str) -> str | None:
        path = files("isobit.observe.report").joinpath(name)
        return path.read_text(encoding="utf-8") if path.is_file() else None

    environment = Environment(
        loader=FunctionLoader(source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    if isinstance(template, Path):
        made = environment.from_string(template.read_text(encoding="utf-8"))
    else:
        made = environment.get_template(template)
    return made.render(version=isobit.__version__, **values)


def _begins_with(path: Path, marker: bytes) -> bool:
    with open_plain(path) as file:
        return file.read(len(marker)) == marker


def write_page(page: str, path: Path, marker: str) -> Path:
    """Write a page; -> ``path``.  An older page, which begins with ``marker``, is replaced.

    Raises ConfigError where another file is, or where the page cannot be written.
    """
    try:
        if path.exists() and not _begins_with(path, marker.encode()):
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


def visible(text: str) -> str:
    """``text`` with symbols instead of control characters, and code points instead of other
    invisible characters.
    """

    def shown(character: str) -> str:
        code = ord(character)
        if character in "\t\n" or character.isprintable():
            return character
        if code == 0x7F:
            return "\N{SYMBOL FOR DELETE}"
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return "".join(map(shown, text))


MARKER = "<!doctype html>\n<!-- isobit report -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""

REFRESH_S = 10
"""Seconds between two writings of the page of a run under way, and between a browser's reloads."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its directory as ``report.html``; -> its path.

    Raises ConfigError for a directory that is no run's, or where the page cannot be written.
    """
    return write_page(render(read_run(root)), out or root / "report.html", MARKER)


def render(record: RunRecord, refresh: bool = False) -> str:
    """The page as text; with ``refresh`` a browser reloads it every ``REFRESH_S`` seconds."""
    changed, unchanged = view_settings(record.setting("config"))
    about = ("started", "device", "versions", "model", "data")
    return render_page(
        "report.html",
        MARKER,
        record=record,
        name=record.root.resolve().name,
        state=state_of(record),
        stopped=reason_of(record),
        refresh=REFRESH_S if refresh else 0,
        started=str(record.setting("started") or "").replace("T", " ").replace("+00:00", " UTC"),
        notices=list(notices(record)),
        tiles=tiles_of(record),
        sections=build_sections(record),
        flow=view_flow(record),
        sources=choose_samples(record.completions),
        shades=SHADES,
        changed=changed,
        unchanged=unchanged,
        environment=list(flatten({key: record.setting(key) for key in about})),
    )


def state_of(record: RunRecord) -> str:
    """How many steps are done, and whether the run goes on."""
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


def reason_of(record: RunRecord) -> str:
    """Why a run was stopped early, and where it can be resumed; empty for any other."""
    if record.finished or record.is_running or not record.ending:
        return ""
    reason, checkpoint = record.ending.get("reason"), record.ending.get("checkpoint")
    text = f"Stopped early: {reason or record.ending.get('kind') or 'nobody said why'}"
    return f"{text}. Last checkpoint: step {checkpoint}" if checkpoint else text


def watch_run(
    root: Path, out: Path | None = None, pause: Callable[[float], None] = time.sleep
) -> Path:
    """Write the page every ``REFRESH_S`` seconds while the run is going, and once more at its end,
    then without reloading; -> its path.  Raises as ``write_report`` does.
    """
    while (record := read_run(root)).is_running and not record.finished:
        write_page(render(record, refresh=True), out or root / "report.html", MARKER)
        pause(REFRESH_S)
    return write_report(root, out)


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


def report(
    run: str | Path, *others: str | Path, out: str | Path | None = None, watch: bool = False
) -> Path:
    """Write the page of a run's directory, by default there as ``report.html``; of several runs, up
    to seven, a page that compares them, by default ``comparison.html``; -> its path.

    With ``watch`` the page of a run under way is written again every ten seconds until it ends.
    Raises ConfigError for a directory that is no run's, or a file that cannot be written.
    """
    place = None if out is None else Path(out)
    if others:
        if watch:
            raise ConfigError("--watch shows one run; leave it out to compare several")
        return write_comparison([Path(run), *map(Path, others)], place or COMPARISON)
    return watch_run(Path(run), place) if watch else write_report(Path(run), place)
