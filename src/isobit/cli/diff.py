"""``isobit diff RUN RUN``: compares two runs file by file, and names where they first differ.

Exit codes: 0 equal, 1 different, 2 they could not be compared.
"""

from collections.abc import Sequence

from isobit.cli.options import Command, option, path_value
from isobit.cli.start import compare_as_rank, starting

_COMMAND = Command(
    "diff",
    "Compare two run directories file by file: digests of the steps, rewards, completions, "
    "metrics (but for times and memory), checkpoints and the trained model.  Names the first step "
    "and file that differ, and exits 1 then; 0 where all is equal, 2 where they cannot be "
    "compared.  Nothing is written.",
    [
        option("first RUN", "a directory that a run wrote", path_value),
        option("second RUN", "the one to compare it with", path_value),
    ],
)


def run_diff(arguments: Sequence[str]) -> int:
    """Compare, print what is equal and what differs, and return the exit code.  Raises IsobitError
    for directories that cannot be compared.
    """
    return compare_as_rank(arguments, lambda words, _: _diff(words))


def _diff(arguments: Sequence[str]) -> int:
    options = _COMMAND.read(arguments)
    with starting():
        from isobit.commands.diff import diff
    result = diff(options.first, options.second)
    for line in (*result.notes, *result.equal, *map(str, result.differences)):
        print(line)
    if result.differences:
        first = result.differences[0]
        print(f"the runs differ, first {first.where}: {first.file}")
    else:
        print("the runs are equal")
    return result.exit_code
