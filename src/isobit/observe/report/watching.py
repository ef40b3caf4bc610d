"""The page of a run under way: written again and again until the run ends."""

import time
from collections.abc import Callable
from pathlib import Path

from isobit.observe.report.page import MARKER, REFRESH_S, render, write_report
from isobit.observe.report.source import read_run
from isobit.observe.report.template import write_page


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
