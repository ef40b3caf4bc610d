"""``isobit verify FOLDER``: whether sampled and trained log-probabilities are equal, bit for bit; ``--bisect``: where they part.

Exit codes: 0 all equal, 1 some differ, 2 something could not be compared.
"""

import json
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.arguments import folder_parser, given, positive, set_threads, settings_from
from isobit.cli.waiting import starting
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.config.schema import PrecisionConfig
    from isobit.run.verify import ScenarioResult, VerifyOptions, VerifyResult

NOT_COMPARED = 2


def run(arguments: Sequence[str]) -> int:
    """Verify, print the counts and return the exit code.  Raises IsobitError for anything that cannot be used."""
    try:
        return _verify(arguments)
    except IsobitError:
        raise
    except Exception:  # a fault is no difference: 1 is kept for those
        traceback.print_exc()
        return NOT_COMPARED


def _verify(arguments: Sequence[str]) -> int:
    options, overrides = _parser().parse_known_args(arguments)

    from isobit.config.schema import VerifyConfig

    settings = settings_from(VerifyConfig, {"precision": options.precision}, overrides)
    set_threads(options)

    with starting():
        from isobit.run.console import Report
        from isobit.run.verify import VerifyOptions, verify

    sizes = given(prompts=options.prompts, samples=options.samples, max_new_tokens=options.max_new_tokens)
    check = Path(options.folder), settings.precision, VerifyOptions(seed=options.seed, **sizes)
    if options.bisect:
        return _bisect(*check, options.json)
    with Report().busy("generating and comparing"):
        result = verify(*check, None if options.json else _print_scenario)
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        _print_result(result)
    return result.exit_code


def _bisect(folder: Path, precision: "PrecisionConfig", sizes: "VerifyOptions", as_json: bool) -> int:
    from isobit.run.bisect.bisect import bisect
    from isobit.run.bisect.describe import describe_bisect

    if as_json:
        result = bisect(folder, precision, sizes)
        print(json.dumps(result.as_json(), indent=2))
        return result.exit_code
    result = bisect(folder, precision, sizes, _print_scenario, _print_trace)
    _print_result(result.verified)
    for line in describe_bisect(result):
        print(line)
    return result.exit_code


def _print_scenario(scenario: "ScenarioResult") -> None:
    counts = scenario.comparison
    print(f"{scenario.name:<40} {counts.tokens_compared:>8,} compared {counts.tokens_differing:>8,} differ", flush=True)


def _print_trace(scenario: str) -> None:
    print(f"observing every operation: {scenario}", flush=True)


def _print_result(result: "VerifyResult") -> None:
    counts = result.comparison
    print(
        f"{result.preset}: {counts.tokens_differing:,} of {counts.tokens_compared:,} log-probabilities differ, "
        f"by {counts.max_abs_diff:.3g} at most"
    )
    for missing in result.missing:
        print(f"not proved: {missing}", file=sys.stderr)


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "verify",
        "Generate ragged batches with preemption, chunking and prefix sharing, and compare every recorded log-probability\n"
        "with the training forward, bit for bit.  Exits 1 on any difference, 2 where something could not be compared.",
        "precision",
    )
    parser.add_argument("--prompts", type=positive, metavar="N", help="random prompts")
    parser.add_argument("--samples", type=positive, metavar="N", help="completions of each prompt")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest completion")
    parser.add_argument("--bisect", action="store_true", help="name the first layer and operation that differ, from checksums of all")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser
