"""``isobit verify FOLDER | --shape NAME``: compares sampled and trained log-probabilities, bit for
bit; ``--bisect`` finds the first operation that differs.

Exit codes: 0 all equal, 1 something differs, 2 something could not be compared.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import folder_parser, given, positive, set_threads, settings_from, whole
from isobit.cli.start import compare_as_rank, start_ranks, starting
from isobit.util.errors import ConfigError, IsobitError
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.config.commands import VerifyConfig
    from isobit.parallel.world import World
    from isobit.proof.verify import ScenarioResult, VerifyResult


def run_verify(arguments: Sequence[str]) -> int:
    """Verify, print the counts and return the exit code. Raises IsobitError for unusable input."""
    return compare_as_rank(arguments, _verify)


def _verify(arguments: Sequence[str], world: "World | None") -> int:
    has_shape = any(word.partition("=")[0] == "--shape" for word in arguments)
    options, overrides = _verify_parser(with_folder=not has_shape).parse_known_args(arguments)

    from isobit.config.commands import VerifyConfig

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
