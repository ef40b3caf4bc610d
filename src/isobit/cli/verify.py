"""``isobit verify FOLDER | --shape NAME``: compares sampled and trained log-probabilities, bit for
bit; ``--bisect`` finds the first operation that differs.

Exit codes: 0 all equal, 1 something differs, 2 something could not be compared.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.options import (
    FOLDER,
    JSON,
    PRECISION,
    SEED,
    THREADS,
    Command,
    also_keys,
    given,
    option,
    positive,
    set_threads,
    whole,
)
from isobit.cli.start import DiffersError, compare_as_rank, start_ranks, starting
from isobit.config.commands import VerifyConfig
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.parallel.world import World
    from isobit.proof.verify import ScenarioResult, VerifyResult


def run_verify(arguments: Sequence[str]) -> int:
    """Verify, print the counts and return the exit code. Raises IsobitError for unusable input."""
    return compare_as_rank(arguments, _verify)


def _verify(arguments: Sequence[str], world: "World | None") -> int:
    has_shape = any(word.partition("=")[0] == "--shape" for word in arguments)
    command = _command(with_folder=not has_shape)
    options, overrides = command.read_some(arguments)
    settings = command.settings(VerifyConfig, options, overrides)
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


def _compare_as_rank(options: Namespace, settings: VerifyConfig, world: "World") -> int:
    """Compare as one of several ranks; rank 0 prints. Raises if any rank found a difference."""
    result = _compare(options, settings, world)
    if world.rank == 0:
        _show(options, result)
    differing = world.all_gather([result.exit_code, result.comparison.tokens_differing])
    for rank, (code, count) in enumerate(differing):
        if code:
            reason = (
                f"{count:,} log-probabilities differ" if count else "not everything was compared"
            )
            raise DiffersError(f"rank {rank}: {reason}", code)
    return 0


def _show(options: Namespace, result: "VerifyResult") -> None:
    if options.json:
        print(json_text(result.as_json(), indent=2))
    else:
        _print_result(result)


def _compare(
    options: Namespace, settings: VerifyConfig, world: "World | None" = None
) -> "VerifyResult":
    from isobit.kernels.backend import use_back_end
    from isobit.models.tensor_parallel import check_ranks
    from isobit.parallel.world import ALONE

    use_back_end(settings.back_end)

    world = world or ALONE
    check_ranks(settings.cluster.rollout_tp, world)
    on_scenario = None if options.json or world.rank > 0 else scenario_printer()
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


def _bisect(options: Namespace, settings: VerifyConfig) -> int:
    from isobit.kernels.backend import use_back_end
    from isobit.proof.bisect import bisect, describe_bisect
    from isobit.proof.verify import VerifyOptions

    if options.shape is not None:
        raise ConfigError(
            "--bisect takes a FOLDER: the checksums of a full-sized model would fill the memory"
        )
    use_back_end(settings.back_end)
    check = Path(options.folder), settings.precision, VerifyOptions(**_sizes(options))
    if options.json:
        result = bisect(*check, device=settings.device)
        print(json_text(result.as_json(), indent=2))
        return result.exit_code
    result = bisect(*check, scenario_printer(), _print_trace, settings.device)
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


def scenario_printer() -> Callable[["ScenarioResult"], None]:
    """Prints a row of at most 80 columns for each scenario, below a header."""
    header = [f"{'scenario':<40} {'compared':>9} {'differ':>7}  {'operations':>12}"]

    def show(scenario: "ScenarioResult") -> None:
        counts, seen = scenario.comparison, scenario.operations
        row = f"{scenario.name:<40} {counts.tokens_compared:>9,} {counts.tokens_differing:>7,}"
        if seen is not None:
            row += f"  {seen.rows:>12,} {'part' if seen.difference else 'equal'}"
        if counts.routings_compared:
            row += f"\n    and{counts.describe_routings().removeprefix(',')}"
        print("\n".join([*header, row]), flush=True)
        header.clear()

    return show


def _print_trace(scenario: str) -> None:
    print(f"observing every operation: {scenario}", flush=True)


def _print_result(result: "VerifyResult") -> None:
    from isobit.observe.console import Console
    from isobit.proof.verify import first_operation

    say = Console().line
    counts = result.comparison
    redrawn, other = result.redrawn
    if redrawn:
        say(
            f"{other:,} of {redrawn:,} completions that several scenarios draw by the same "
            "settings differ between them"
            + (": the noise or the logits depend on the batch" if other else "")
        )
    say(
        f"{result.flow}: {counts.tokens_differing:,} of {counts.tokens_compared:,} "
        f"log-probabilities{counts.describe_routings()} differ, "
        f"by {counts.max_abs_diff:.3g} at most"
    )
    if result.operations:
        rows = sum(operations.rows for operations in result.operations)
        differs = first_operation(result)
        say(
            f"{rows:,} rows of {result.operations[0].sites} operations, numbers before rounding "
            "included: " + (f"they part at {differs}" if differs else "all equal")
        )
        if differs and not counts.differs:
            say("no log-probability shows it; --bisect says more")
    for missing in result.missing:
        print(f"not proved: {missing}", file=sys.stderr)
    if result.missing:
        larger = "larger --prompts, --samples or --max-new-tokens usually make these happen"
        print(larger, file=sys.stderr)


def _command(with_folder: bool) -> Command:
    options = [
        PRECISION,
        SEED,
        THREADS,
        option("--prompts N", "random prompts", whole(1, 10_000)),
        option("--samples N", "completions of each prompt", whole(1, 10_000)),
        option("--max-new-tokens N", "longest completion", positive),
        option(
            "--shape NAME",
            "random weights of a model's shape, made on the device, instead of FOLDER: qwen3-8b",
        ),
        option(
            "--longest N", "with --shape: tokens of the longest sequence, by default 8192", positive
        ),
        option("--outliers", "with --shape: plant outliers in the weights and large biases of K"),
        option("--bisect", "name the first layer and operation that differ, from checksums of all"),
        JSON,
    ]
    return Command(
        "verify",
        "Generate ragged batches with preemption, chunking and prefix sharing, and compare every "
        "recorded log-probability with the training forward, bit for bit.  Exits 1 on any "
        "difference, 2 where something could not be compared.",
        [FOLDER, *options] if with_folder else options,
        also_keys("precision, device and back_end"),
    )
