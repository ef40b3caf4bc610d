"""``isobit report RUN``: writes the metrics of runs as an HTML page."""

from collections.abc import Sequence

from isobit.cli.options import Command, option, path_value

_COMMAND = Command(
    "report",
    "Write a run's rewards, lengths, entropy, log-probability differences, speed, precision flow "
    "and sample completions as one HTML page, which opens without a network.  It also shows a run "
    "that is still going, or one that was stopped.  Of several runs, the page compares them.",
    [
        option(
            "runs RUN",
            "the directory that `isobit train` or `isobit sft` wrote (its `output`); up to seven",
            path_value,
            nargs="+",
        ),
        option(
            "--out FILE",
            "where to write the page; by default RUN/report.html, of several comparison.html",
            path_value,
        ),
        option(
            "--watch",
            "write the page again every 10 s until the run ends; a browser reads it again too",
        ),
    ],
)


def run_report(arguments: Sequence[str]) -> int:
    """Write the page. Raises IsobitError if there is no run, or the file cannot be written."""
    options = _COMMAND.read(arguments)

    from isobit.observe.report.page import report

    if options.watch:
        print("the page is written again until the run ends; Ctrl-C stops that", flush=True)
    path = report(*options.runs, out=options.out, watch=options.watch)
    print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    return 0
