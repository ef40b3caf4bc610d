"""``isobit report RUN [RUN ...]``: the figures, the precision flow and sample completions of a run,
or several runs beside each other, as one HTML page.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """Write the page and say where it is.  Raises IsobitError for a directory that is no run's, or
    a file that cannot be written.
    """
    options = _parser().parse_args(arguments)

    from isobit.observe.report.written import report

    if options.watch:
        print("the page is written again until the run ends; Ctrl-C stops that", flush=True)
    path = report(*options.runs, out=options.out, watch=options.watch)
    print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit report",
        description=(
            "Write a run's rewards, lengths, entropy, log-probability differences, speed, "
            "precision flow and sample completions as one "
            "HTML page, which opens without a network.  It also shows a run that is still going, "
            "or one that was stopped.  Of several runs, the page compares them."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="the directory that `isobit train` or `isobit sft` wrote (its `output`); up to seven",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write the page; by default RUN/report.html, of several comparison.html",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write the page again every 10 s until the run ends; a browser reads it again too",
    )
    return parser
