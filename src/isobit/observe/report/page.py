"""Writes the page of a run, and again while the run goes on until it ends."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.observe.report.chart import STEPS
from isobit.observe.report.comparison import COMPARISON, write_comparison
from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.headline import reason_of, state_of, tiles_of
from isobit.observe.report.notices import notices
from isobit.observe.report.panels import build_sections
from isobit.observe.report.samples import SHADES, choose_samples
from isobit.observe.report.series import View
from isobit.observe.report.settings import view_environment, view_settings
from isobit.observe.report.templates import MARKER, render_page, write_page
from isobit.observe.run_record import RunRecord, read_run
from isobit.util.errors import ConfigError

REFRESH_S = 10
"""Seconds between two writings of the page of a run under way, and between a browser's reloads."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its directory as ``report.html``; -> its path.

    Raises ConfigError for a directory that is no run's, or where the page cannot be written.
    """
    return write_page(render(read_run(root)), out or root / "report.html", MARKER)


def render(record: RunRecord, refresh: bool = False) -> str:
    """The page as text; with ``refresh`` a browser reloads it every ``REFRESH_S`` seconds."""
    return render_page(
        "report.html",
        MARKER,
        record=record,
        name=record.root.resolve().name,
        state=state_of(record),
        refresh=REFRESH_S if refresh else 0,
        started=str(record.setting("started") or "").replace("T", " ").replace("+00:00", " UTC"),
        sources=choose_samples(record.completions),
        shades=SHADES,
        **describe_run(record),
    )


def describe_run(record: RunRecord, view: View = STEPS) -> dict[str, Any]:
    """The values of a run that its page and the viewer show."""
    changed, unchanged = view_settings(record.setting("config"))
    return {
        "stopped": reason_of(record),
        "notices": list(notices(record)),
        "tiles": tiles_of(record),
        "sections": build_sections(record, view),
        "flow": view_flow(record),
        "changed": changed,
        "unchanged": unchanged,
        "environment": view_environment(record.manifest),
    }


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
