"""The commands that check. Exit codes: 0 all equal and nothing failed, 1 something differs or
failed, 2 it could not be done.

    isobit verify FOLDER | --shape NAME   sampled and trained log-probabilities, bit for bit;
                                          ``--bisect`` finds the first difference
    isobit doctor                         this machine
    isobit replay RUN [--step K]          whether steps of a recorded run, done again, come out as
                                          they were recorded
    isobit diff RUN RUN                   whether two runs are equal, file by file, and where they
                                          first differ
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import (
    add_allow_change,
    allowed_names,
    folder_parser,
    given,
    path_value,
    positive,
    set_threads,
    settings_from,
    whole,
)
from isobit.cli.main import compare_as_rank, start_ranks, starting
from isobit.config.base import MAX_PROCESSES
from isobit.util.errors import ConfigError, IsobitError
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.config.recipes import VerifyConfig
    from isobit.parallel.world import World
    from isobit.proof.doctor_findings import Finding
    from isobit.proof.verify import ScenarioResult, VerifyResult


_MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL"}


def run_doctor(arguments: Sequence[str]) -> int:
    options = _doctor_parser().parse_args(arguments)

    with starting():
        from isobit.proof.doctor import examine

    result = (
        examine(options.directory)
        if options.json
        else examine(options.directory, _announce, _print_finding)
    )
    if options.json:
        print(json_text(result.as_json(), indent=2))
        return result.exit_code
    print(
        f"\n{result.count('pass')} passed, {result.count('warn')} warnings, {result.count('fail')} "
        "failed"
    )
    for line in result.runs_here:
        print(line)
    return result.exit_code


def _announce(name: str) -> None:
    """On a terminal, show the running check until its finding replaces the line."""
    if sys.stdout.isatty():
        print(f"....  {name}", end="\r", flush=True)


def _print_finding(finding: "Finding") -> None:
    print(f"{_MARKS[finding.status]}  {finding.name:<26}  {finding.detail}", flush=True)
    if finding.fix:
        print(f"      fix: {finding.fix}", flush=True)


def _doctor_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit doctor",
        description=(
            "Test this machine: versions, disk and memory, the quantisers against stored bytes, "
            "every kernel for exactness at one thread\n"
            "and at all, and the starter model.  Takes half a minute to two minutes on a CPU; "
            "exits 1 where anything failed."
        ),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--directory",
        type=path_value,
        default=Path(),
        metavar="DIR",
        help="where files are tried out; by default the current one",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser


def run_verify(arguments: Sequence[str]) -> int:
    """Verify, print the counts and return the exit code. Raises IsobitError for unusable input."""
    return compare_as_rank(arguments, _verify)


def _verify(arguments: Sequence[str], world: "World | None") -> int:
    has_shape = any(word.partition("=")[0] == "--shape" for word in arguments)
    options, overrides = _verify_parser(with_folder=not has_shape).parse_known_args(arguments)

    from isobit.config.recipes import VerifyConfig

    settings = settings_from(VerifyConfig, {"precision": options.precision}, overrides)
    ranks = settings.cluster.rollout_tp
    if options.bisect and (ranks > 1 or world is not None):
        raise ConfigError(
            "--bisect observes one process; leave cluster.rollout_tp out, which changes no bit"
        )
    if world is None and ranks > 1:
        start_ranks("verify", arguments, ranks, options.threads)
        return 0
    set_threads(options)
    if options.bisect:
        return _bisect(options, settings)
    if world is not None:
        return _compare_as_rank(options, settings, world)
    with starting():
        from isobit.observe.console import Console

    with Console().busy("generating and comparing"):
        result = _compare(options, settings)
    _show(options, result)
    return result.exit_code


def _compare_as_rank(options: Namespace, settings: "VerifyConfig", world: "World") -> int:
    """Compare as one of several ranks; rank 0 prints. Raises if any rank found a difference."""
    result = _compare(options, settings, world)
    if world.rank == 0:
        _show(options, result)
    differing = world.all_gather([result.exit_code, result.comparison.tokens_differing])
    for rank, (code, count) in enumerate(differing):
        if code:
            found = (
                f"{count:,} log-probabilities differ" if count else "not everything was compared"
            )
            raise _NotProvedError(f"rank {rank}: {found}", code)
    return 0


class _NotProvedError(IsobitError):
    """The error of one of several ranks, since their launcher expects an error."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _show(options: Namespace, result: "VerifyResult") -> None:
    if options.json:
        print(json_text(result.as_json(), indent=2))
    else:
        _print_result(result)


def _compare(
    options: Namespace, settings: "VerifyConfig", world: "World | None" = None
) -> "VerifyResult":
    from isobit.models.tensor_parallel import check_ranks
    from isobit.parallel.world import ALONE

    world = world or ALONE
    check_ranks(settings.cluster.rollout_tp, world)
    on_scenario = None if options.json or world.rank > 0 else _print_scenario
    if options.shape is not None:
        from isobit.proof.full_size import FullSizeOptions, verify_shape

        sizes = FullSizeOptions(
            **_sizes(options), **given(longest=options.longest), outliers=options.outliers
        )
        return verify_shape(
            options.shape, settings.precision, settings.device, sizes, on_scenario, world
        )
    from isobit.proof.verify import VerifyOptions, verify

    return verify(
        Path(options.folder),
        settings.precision,
        VerifyOptions(**_sizes(options)),
        on_scenario,
        settings.device,
        world,
    )


def _bisect(options: Namespace, settings: "VerifyConfig") -> int:
    from isobit.proof.bisect import bisect, describe_bisect
    from isobit.proof.verify import VerifyOptions

    if options.shape is not None:
        raise ConfigError(
            "--bisect takes a FOLDER: the checksums of a full-sized model would fill the memory"
        )
    check = Path(options.folder), settings.precision, VerifyOptions(**_sizes(options))
    if options.json:
        result = bisect(*check, device=settings.device)
        print(json_text(result.as_json(), indent=2))
        return result.exit_code
    result = bisect(*check, _print_scenario, _print_trace, settings.device)
    _print_result(result.verified)
    for line in describe_bisect(result):
        print(line)
    return result.exit_code


def _sizes(options: Namespace) -> dict[str, Any]:
    return given(
        prompts=options.prompts,
        samples=options.samples,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )


def _print_scenario(scenario: "ScenarioResult") -> None:
    counts = scenario.comparison
    print(
        f"{scenario.name:<40} {counts.tokens_compared:>8,} compared {counts.tokens_differing:>8,} "
        f"differ{counts.describe_routings()}{_operations(scenario)}",
        flush=True,
    )


def _operations(scenario: "ScenarioResult") -> str:
    seen = scenario.operations
    if seen is None:
        return ""
    return f"  {seen.rows:>9,} rows of operations " + ("part" if seen.difference else "equal")


def _print_trace(scenario: str) -> None:
    print(f"observing every operation: {scenario}", flush=True)


def _print_result(result: "VerifyResult") -> None:
    from isobit.proof.verify import first_operation

    counts = result.comparison
    redrawn, other = result.redrawn
    if redrawn:
        print(
            f"{other:,} of {redrawn:,} completions that several scenarios draw by the same "
            "settings differ between them"
            + (": the noise or the logits depend on the batch" if other else "")
        )
    print(
        f"{result.flow}: {counts.tokens_differing:,} of {counts.tokens_compared:,} "
        f"log-probabilities{counts.describe_routings()} differ, "
        f"by {counts.max_abs_diff:.3g} at most"
    )
    if result.operations:
        rows = sum(one.rows for one in result.operations)
        differs = first_operation(result)
        print(
            f"{rows:,} rows of {result.operations[0].sites} operations, numbers before rounding "
            "included: " + (f"they part at {differs}" if differs else "all equal")
        )
        if differs and not counts.differs:
            print("no log-probability shows it; --bisect says more")
    for missing in result.missing:
        print(f"not proved: {missing}", file=sys.stderr)


def _verify_parser(with_folder: bool) -> ArgumentParser:
    parser = folder_parser(
        "verify",
        "Generate ragged batches with preemption, chunking and prefix sharing, and compare every "
        "recorded log-probability\n"
        "with the training forward, bit for bit.  Exits 1 on any difference, 2 where something "
        "could not be compared.",
        "precision and device",
        with_folder,
    )
    parser.add_argument("--prompts", type=whole(1, 10_000), metavar="N", help="random prompts")
    parser.add_argument(
        "--samples", type=whole(1, 10_000), metavar="N", help="completions of each prompt"
    )
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest completion")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights of a model's shape, made on the device, instead of FOLDER: qwen3-8b",
    )
    parser.add_argument(
        "--longest",
        type=positive,
        metavar="N",
        help="with --shape: tokens of the longest sequence, by default 8192",
    )
    parser.add_argument(
        "--outliers",
        action="store_true",
        help="with --shape: plant outliers in the weights and large biases of K",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="name the first layer and operation that differ, from checksums of all",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser


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


def run_diff(arguments: Sequence[str]) -> int:
    """Compare, print what is equal and what differs, and return the exit code.  Raises IsobitError
    for directories that cannot be compared.
    """
    return compare_as_rank(arguments, lambda words, _: _diff(words))


def _diff(arguments: Sequence[str]) -> int:
    options = _diff_parser().parse_args(arguments)
    with starting():
        from isobit.commands.diff import diff
    result = diff(options.one, options.other)
    for line in (*result.notes, *result.equal, *map(str, result.differences)):
        print(line)
    if result.differences:
        first = result.differences[0]
        print(f"the runs differ, first {first.where}: {first.file}")
    else:
        print("the runs are equal")
    return result.exit_code


def _diff_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit diff",
        description=(
            "Compare two run directories file by file: digests of the steps, rewards, completions, "
            "metrics (but for times\nand memory), checkpoints and the trained model.  Names the "
            "first step and file that differ, and exits 1 then;\n0 where all is equal, 2 where "
            "they cannot be compared.  Nothing is written."
        ),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("one", metavar="RUN", type=path_value, help="a directory that a run wrote")
    parser.add_argument("other", metavar="RUN", type=path_value, help="the one to compare it with")
    return parser
