"""``isobit eval FOLDER`` measures a model folder on a dataset with a reward; ``isobit eval
--reward-model FOLDER --data FILE`` scores answers or pairs with a reward model.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import (
    add_data,
    add_output,
    add_threads,
    check_new,
    evaluation_source,
    folder_parser,
    given,
    path_value,
    positive,
    precision_value,
    set_threads,
    settings_from,
)
from isobit.cli.start import obey_as_rank, start_ranks, starting
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.commands.score import ScoredRow
    from isobit.parallel.world import World


FLAG = "--reward-model"


def evaluate_reward_model(arguments: Sequence[str]) -> int:
    options, overrides = _reward_parser().parse_known_args(arguments)
    if options.out is not None:
        check_new(options.out)

    from isobit.config.commands import ScoringConfig

    kind = "hf" if path_value(options.data).is_dir() else "jsonl"
    values = {
        "precision": options.precision,
        "data": {"type": kind, "path": options.data, **given(limit=options.problems)},
        "chat": not options.no_chat,
    }
    config = settings_from(ScoringConfig, values, overrides)
    set_threads(options)
    with starting():
        from isobit.commands.score import describe_scores, score_rows, summarise

    result = summarise(list(_written(score_rows(options.folder, config), options.out)))
    if options.json:
        print(json_text(asdict(result), indent=2))
    else:
        print(f"{config.precision.name}: {describe_scores(result)}")
    return 0


def _written(rows: "Iterable[ScoredRow]", out: Path | None) -> "Iterator[ScoredRow]":
    """The rows, each written to the file ``out`` before the next is computed."""
    if out is None:
        yield from rows
        return
    with out.open("x", encoding="utf-8", buffering=1) as file:
        for one in rows:
            line = {name: value for name, value in asdict(one).items() if value is not None}
            file.write(json_text(line) + "\n")
            yield one


def _reward_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit eval",
        description=(
            "Score the answers of a file with a reward model: rows of `prompt` and `completion`, "
            "or pairs of `prompt`, `chosen` and `rejected`."
        ),
        epilog=(
            "--KEY VALUE sets any key of precision and data as well, for example "
            "--data.completion answer, and tokens_per_batch."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        FLAG,
        dest="folder",
        type=path_value,
        required=True,
        metavar="FOLDER",
        help="a Hugging Face folder, or a name of the hub, of a ...ForSequenceClassification "
        "model with one label",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="WHAT",
        help="a JSONL file, or a Hugging Face dataset's folder",
    )
    parser.add_argument(
        "--precision",
        type=precision_value,
        metavar="NAME",
        default="fp8",
        help="fp32, bf16, fp8 (default) or int8",
    )
    add_threads(parser)
    parser.add_argument(
        "--problems", type=positive, metavar="N", help="use the first N rows; by default all"
    )
    parser.add_argument(
        "--no-chat",
        action="store_true",
        help="take prompts as they stand, without the tokenizer's chat template",
    )
    parser.add_argument(
        "--out",
        type=path_value,
        metavar="FILE.jsonl",
        help="write a line for each row there, as it is scored",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate and print. Raises IsobitError for unusable input."""
    if any(word.partition("=")[0] == FLAG for word in arguments):
        return evaluate_reward_model(arguments)
    return obey_as_rank(arguments, _eval)


def _eval(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _parser().parse_known_args(arguments)

    from isobit.config.recipes import RunConfig

    config = settings_from(RunConfig, _values(options), overrides)
    ranks = config.cluster.rollout_tp
    if config.cluster.processes not in (1, ranks):
        raise ConfigError(
            f"cluster.processes is {config.cluster.processes}, but an evaluation has one engine, "
            f"which cluster.rollout_tp = {ranks} processes share; leave cluster.processes out"
        )
    if world is None and ranks > 1:
        start_ranks("eval", arguments, ranks, options.threads)
        return 0
    set_threads(options)

    with starting():
        from isobit.commands.evaluate import evaluate_folder
        from isobit.observe.console import Console, describe_result, terminal_on
        from isobit.parallel.world import ALONE

    printed = redirect_stdout(sys.stderr)  # by a reward in this process: stdout may be JSON
    with Console(terminal_on("stderr")).generating("evaluation") as progress, printed:
        results = evaluate_folder(Path(options.folder), config, progress, world or ALONE)
    if world is not None and world.rank > 0:
        return 0
    if options.json:
        print(json_text({name: one.figures() for name, one in results.items()}, indent=2))
    else:
        Console().line(
            "\n".join(
                f"{config.precision.name}: {describe_result(name, result)}"
                for name, result in results.items()
            )
        )
    return 0


def _values(options: Namespace) -> dict[str, Any]:
    """The tables of a run with this evaluation; its training data and output are not used."""
    name, source = evaluation_source(options)
    evaluation = given(
        samples=options.samples,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
    )
    return {
        "output": options.folder,
        "seed": options.seed,
        "precision": options.precision,
        "data": {"train": source, "eval": {name: source}, "chat": not options.no_chat},
        "reward": {"function": options.reward},
        "evaluation": evaluation,
    }


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "eval",
        "Measure a model folder on a dataset with a reward.  `isobit eval --reward-model FOLDER "
        "--data FILE` scores the answers of a file with a reward model instead; `isobit eval "
        "--reward-model FOLDER --help` says how.",
        "precision, rollout, data and evaluation",
    )
    add_data(parser, required=True)
    parser.add_argument(
        "--reward",
        default="reasoning_gym",
        metavar="NAME",
        help=(
            "module:function or path/to/file.py:function; by default the scorer of the "
            "reasoning-gym task"
        ),
    )
    parser.add_argument(
        "--samples", metavar="N", help="samples a problem, by default 1: gives mean@n and pass@k"
    )
    parser.add_argument("--temperature", metavar="T", help="by default 0, greedy")
    parser.add_argument("--max-new-tokens", metavar="N", help="longest completion")
    add_output(parser)
    return parser
