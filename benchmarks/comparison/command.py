"""A benchmark's command line: subcommands that carry the function to run, and errors in one
line.
"""

import argparse
import sys

from isobit.util.errors import IsobitError


def run_command(parser: argparse.ArgumentParser) -> int:
    """Run what the arguments ask for; -> the exit code."""
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except IsobitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
