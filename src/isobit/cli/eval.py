"""``isobit eval FOLDER``: how often a model folder is right on a dataset, by a reward.  With
``--reward-model FOLDER`` a reward model scores a file's answers (``isobit.cli.eval_reward_model``).
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli import eval_reward_model
from isobit.cli.arguments import (
    data_table,
    folder_parser,
    given,
    positive,
    set_threads,
    settings_from,
)
from isobit.cli.ranks import obey_as_rank, start_ranks
from isobit.cli.waiting import starting
from isobit.errors import ConfigError

if TYPE_CHECKING:
    from isobit.parallel.world import World

_TASK = "task:"


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print.  Raises IsobitError for anything that cannot be used."""
    if any(word.partition("=")[0] == eval_reward_model.FLAG for word in arguments):
        return eval_reward_model.run(arguments)
    return obey_as_rank(arguments, _eval)


def _eval(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _parser().parse_known_args(arguments)

    from isobit.config.run import RunConfig

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
        from isobit.observe.console import Console, describe_result, terminal_on
        from isobit.parallel.world import ALONE
        from isobit.run.evaluate import evaluate_folder

    printed = redirect_stdout(sys.stderr)  # by a reward in this process: stdout may be JSON
    with Console(terminal_on("stderr")).generating("evaluation") as progress, printed:
        results = evaluate_folder(Path(options.folder), config, progress, world or ALONE)
    if world is not None and world.rank > 0:
        return 0
    if options.json:
        print(json.dumps({name: one.figures() for name, one in results.items()}, indent=2))
    else:
        Console().line(
            "\n".join(
                f"{config.precision.preset}: {describe_result(name, result)}"
                for name, result in results.items()
            )
        )
    return 0


def _values(options: Namespace) -> dict[str, Any]:
    """The tables of a run whose evaluation is this one.  What only training reads, its data and
    output, is filled in and not used.
    """
    name, source = _source(options)
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


def _source(options: Namespace) -> tuple[str, dict[str, Any]]:
    """The name of the set and its table: a task of reasoning-gym, a dataset's folder or a JSONL
    file.
    """
    text: str = options.data
    if text.startswith(_TASK):
        name = text.removeprefix(_TASK)
        return name, {
            "type": "reasoning_gym",
            "task": name,
            "seed": options.seed,
            **given(size=options.problems),
        }
    table = data_table(text, options.split) | given(limit=options.problems)
    return Path(text.rpartition(":")[2].partition("@")[0]).stem, table


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "eval",
        "Measure a model folder on a dataset with a reward.  `isobit eval --reward-model FOLDER "
        "--data FILE` scores the answers of a file with a reward model instead; `isobit eval "
        "--reward-model FOLDER --help` says how.",
        "precision, rollout, data and evaluation",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="WHAT",
        help=(
            "a JSONL, CSV or Parquet file, a Hugging Face dataset's folder, hub:ORG/NAME for a "
            "dataset of the hub, task:NAME for a task of reasoning-gym, or starter:held_out.jsonl"
        ),
    )
    parser.add_argument(
        "--split", metavar="NAME", help="of a folder or a dataset of the hub that has several"
    )
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
        "--problems",
        type=positive,
        metavar="N",
        help="use the first N; by default all, or 1000 of a task",
    )
    parser.add_argument(
        "--samples", metavar="N", help="samples a problem, by default 1: gives mean@n and pass@k"
    )
    parser.add_argument("--temperature", metavar="T", help="by default 0, greedy")
    parser.add_argument("--max-new-tokens", metavar="N", help="longest completion")
    parser.add_argument(
        "--no-chat",
        action="store_true",
        help="take prompts as they stand, without the tokenizer's chat template",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser
