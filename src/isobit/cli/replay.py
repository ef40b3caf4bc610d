"""``isobit replay RUN``: does steps of a recorded run again, and compares them with the record.

Exit codes: 0 all equal, 1 something differs, 2 it could not be done.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.options import (
    Command,
    allow_change,
    allowed_names,
    option,
    path_value,
    positive,
    whole,
)
from isobit.cli.start import DiffersError, compare_as_rank, start_ranks, starting
from isobit.config.base import MAX_PROCESSES

if TYPE_CHECKING:
    from isobit.commands.diff import RunComparison
    from isobit.parallel.world import World

_COMMAND = Command(
    "replay",
    "Do steps of a recorded run again, from a checkpoint or from the start, and compare the files "
    "that this writes with those of the run, as `isobit diff` does.  Exits 1 on any difference, "
    "and names the step.  Nothing is written into RUN.",
    [
        option("run RUN", "the directory that `isobit train` wrote", path_value),
        option(
            "--step K",
            "do step K again, from the newest checkpoint before it; by default all steps, from "
            "the start",
            positive,
        ),
        option(
            "--recorded-rewards",
            "take the rewards from rewards.jsonl where it has these completions, for a reward "
            "that does not repeat (a judge, a clock); by default all are graded anew",
        ),
        option(
            "--output PATH",
            "where the files of the second run stay, without its checkpoints; by default they are "
            "removed",
            path_value,
        ),
        allow_change(
            "an input, or a class of bits, that may be other than in the run; a refused replay "
            "names them"
        ),
        option(
            "--processes N",
            "one a GPU, whatever the run had; by default 1",
            whole(1, MAX_PROCESSES),
            default=1,
        ),
    ],
    "After RUN, --KEY VALUE sets keys of the recipe that change no step, for example "
    "--rollout.kv_memory_gib 20; all others are refused.",
)


def run_replay(arguments: Sequence[str]) -> int:
    """Replay, print what differs and return the exit code.  Raises IsobitError for anything that
    cannot be used.
    """
    return compare_as_rank(arguments, _replay)


def _replay(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _COMMAND.read_some(arguments)
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
        raise DiffersError(_describe(options.run, result), result.exit_code)
    return result.exit_code


def _describe(root: Path, result: "RunComparison") -> str:
    from isobit.commands.replay import describe_steps

    assert result.steps is not None
    done = f"{root}: {describe_steps(result.steps)} done again"
    if not result.differences:
        return f"{done}: all equal"
    first = result.differences[0]
    return f"{done}: the runs differ, first {first.where}: {first.file}"
