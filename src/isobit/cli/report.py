"""``isobit report RUN``: the figures, the precision flow and sample completions of a run, as one
HTML page.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """Write the page and say where it is.  Raises IsobitError for a directory that is no run's, or
    a file that cannot be written.
    """
    options = _parser().parse_args(arguments)

    from isobit.observe.report.page import write_report

    path = write_report(options.run, options.out)
    print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit report",
        description=(
            "Write a run's rewards, lengths, entropy, log-probability differences, speed, "
            "precision flow and sample completions as one "
            "HTML page, which opens without a network.  It also shows a run that is still going, "
            "or one that was stopped."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the directory that `isobit train` wrote (its `output`)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write the page; by default RUN/report.html",
    )
    return parser
