"""``isobit replay RUN``: does steps of a recorded run again, and compares them with the record.

Exit codes: 0 all equal, 1 something differs, 2 it could not be done.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.arguments import add_allow_change, allowed_names, path_value, positive, whole
from isobit.cli.start import compare_as_rank, start_ranks, starting
from isobit.config.base import MAX_PROCESSES
from isobit.util.errors import IsobitError

if TYPE_CHECKING:
    from isobit.commands.diff import RunComparison
    from isobit.parallel.world import World


def run_replay(arguments: Sequence[str]) -> int:
    """Replay, print what differs and return the exit code.  Raises IsobitError for anything that
    cannot be used.
    """
    return compare_as_rank(arguments, _replay)


def _replay(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _replay_parser().parse_known_args(arguments)
    if world is None and options.processes > 1:
        start_ranks("replay", arguments, options.processes, threads=None)
        return 0
    with starting():
        from isobit.commands.replay import replay
        from isobit.parallel.world import ALONE

    result = replay(
        options.run,
        options.step,
        partial(print, flush=True),
        overrides,
        allowed_names(options),
        options.recorded_rewards,
        world or ALONE,
        options.output,
    )
    if world is None or world.rank == 0:
        print(_describe(options.run, result))
    if world is not None and result.exit_code:
        raise _DiffersError(_describe(options.run, result))
    return result.exit_code


class _DiffersError(IsobitError):
    """Of several ranks, whose launcher takes an error as the reason that they end."""

    exit_code = 1


def _describe(root: Path, result: "RunComparison") -> str:
    from isobit.commands.replay import describe_steps

    assert result.steps is not None
    done = f"{root}: {describe_steps(result.steps)} done again"
    if not result.differences:
        return f"{done}: all equal"
    first = result.differences[0]
    return f"{done}: the runs differ, first {first.where}: {first.file}"


def _replay_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit replay",
        description=(
            "Do steps of a recorded run again, from a checkpoint or from the start, and compare "
            "the files that this writes with\nthose of the run, as `isobit diff` does.  Exits 1 on "
            "any difference, and names the step.  Nothing is written\ninto RUN."
        ),
        epilog=(
            "After RUN, --KEY VALUE sets keys of the recipe that change no step, for example "
            "--rollout.kv_memory_gib 20; all\nothers are refused."
        ),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", type=path_value, help="the directory that `isobit train` wrote"
    )
    parser.add_argument(
        "--step",
        type=positive,
        metavar="K",
        help="do step K again, from the newest checkpoint before it; by default all steps, from "
        "the start",
    )
    parser.add_argument(
        "--recorded-rewards",
        action="store_true",
        help="take the rewards from rewards.jsonl where it has these completions, for a reward "
        "that does not repeat (a judge, a clock); by default all are graded anew",
    )
    parser.add_argument(
        "--output",
        type=path_value,
        metavar="PATH",
        help="where the files of the second run stay, without its checkpoints; by default they are "
        "removed",
    )
    add_allow_change(
        parser,
        "an input, or a class of bits, that may be other than in the run; a refused replay names "
        "them",
    )
    parser.add_argument(
        "--processes",
        type=whole(1, MAX_PROCESSES),
        default=1,
        metavar="N",
        help="one a GPU, whatever the run had; by default 1",
    )
    return parser
