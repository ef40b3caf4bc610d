"""The page of a run, or of several, for the command and for Python."""

from pathlib import Path

from isobit.errors import ConfigError
from isobit.observe.report.comparison import write_comparison
from isobit.observe.report.page import write_report
from isobit.observe.report.watching import watch_run

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
