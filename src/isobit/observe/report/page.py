"""The page: everything that the template needs, put through it, and written as a whole.

Text from prompts, completions, configurations and file names is escaped by the template engine,
never by hand; characters that are invisible or could change the direction of the text are replaced
by visible ones before that.
"""

from pathlib import Path

import isobit
from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.notices import notices
from isobit.observe.report.panels import build_sections
from isobit.observe.report.samples import SHADES, choose_samples
from isobit.observe.report.settings import flatten, view_settings
from isobit.observe.report.source import RunRecord, read_run
from isobit.observe.report.template import render_template, write_page
from isobit.observe.report.tiles import tiles_of

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
