"""``isobit eval FOLDER`` measures a model folder on a dataset with a reward; ``isobit eval
--reward-model FOLDER --data FILE`` scores answers or pairs with a reward model.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.options import (
    JSON,
    NO_CHAT,
    SAMPLING,
    THREADS,
    Command,
    Option,
    also_keys,
    check_new,
    given,
    option,
    path_value,
    positive,
    precision_value,
    set_threads,
)
from isobit.cli.start import obey_as_rank, start_ranks, starting
from isobit.config.commands import ScoringConfig
from isobit.config.data import file_rows
from isobit.config.recipes import RunConfig
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.commands.score import ScoredRow
    from isobit.parallel.world import World


FLAG = "--reward-model"
_TASK = "task:"
SPLIT = option("--split NAME", "of a folder or a dataset of the hub that has several")
PROBLEMS = option("--problems N", "use the first N; by default all, or 1000 of a task", positive)
MAX_NEW_TOKENS = option("--max-new-tokens N", "longest completion", key="evaluation.max_new_tokens")


def data_option(required: bool) -> Option:
    return option(
        "--data WHAT",
        "a JSONL, CSV or Parquet file, a Hugging Face dataset's folder, hub:ORG/NAME for a dataset "
        "of the hub, task:NAME for a task of reasoning-gym, or starter:held_out.jsonl",
        required=required,
    )


_COMMAND = Command(
    "eval",
    "Measure a model folder on a dataset with a reward.  `isobit eval --reward-model FOLDER "
    "--data FILE` scores the answers of a file with a reward model instead; `isobit eval "
    "--reward-model FOLDER --help` says how.",
    [
        *SAMPLING,
        data_option(required=True),
        SPLIT,
        PROBLEMS,
        option(
            "--reward NAME",
            "module:function or path/to/file.py:function; by default the scorer of the "
            "reasoning-gym task",
            str,
            key="reward.function",
            default="reasoning_gym",
        ),
        option(
            "--samples N",
            "samples a problem, by default 1: gives mean@n and pass@k",
            key="evaluation.samples",
        ),
        option("--temperature T", "by default 0, greedy", key="evaluation.temperature"),
        MAX_NEW_TOKENS,
        NO_CHAT,
        JSON,
    ],
    also_keys("precision, rollout, data and evaluation"),
)
_REWARD_MODEL = Command(
    "eval",
    "Score the answers of a file with a reward model: rows of `prompt` and `completion`, or pairs "
    "of `prompt`, `chosen` and `rejected`.",
    [
        option(
            f"{FLAG} FOLDER",
            "a Hugging Face folder, or a name of the hub, of a ...ForSequenceClassification model "
            "with one label",
            path_value,
            dest="folder",
            required=True,
        ),
        option(
            "--data WHAT",
            "a JSONL, CSV or Parquet file, a Hugging Face dataset's folder, or hub:ORG/NAME",
            required=True,
        ),
        SPLIT,
        option(
            "--precision NAME",
            "int8 (default), fp8, bf16 or fp32",
            precision_value,
            key="precision",
        ),
        THREADS,
        option("--problems N", "use the first N rows; by default all", positive),
        NO_CHAT,
        option("--out FILE.jsonl", "write a line for each row there, as it is scored", path_value),
        JSON,
    ],
    "--KEY VALUE sets any key of precision and data as well, for example --data.completion answer, "
    "and tokens_per_batch.",
)


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate and print. Raises IsobitError for unusable input."""
    if any(word.partition("=")[0] == FLAG for word in arguments):
        return _score_with_reward_model(arguments)
    return obey_as_rank(arguments, _eval)


def _eval(arguments: Sequence[str], world: "World | None") -> int:
    options, overrides = _COMMAND.read_some(arguments)
    name, source = evaluation_source(options)
    config = _COMMAND.settings(
        RunConfig,
        options,
        overrides,
        output=options.folder,
        seed=options.seed,
        data={"train": source, "eval": {name: source}, "chat": not options.no_chat},
    )  # the training data and the output are not used
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
        print(json_text({name: result.figures() for name, result in results.items()}, indent=2))
    else:
        Console().line(
            "\n".join(
                f"{config.precision.name}: {describe_result(name, result)}"
                for name, result in results.items()
            )
        )
    return 0


def evaluation_source(options: Namespace) -> tuple[str, dict[str, Any]]:
    """The name of the data that ``--data`` and ``--split`` name, and its table."""
    text: str = options.data
    if text.startswith(_TASK):
        name = text.removeprefix(_TASK)
        return name, {
            "type": "reasoning_gym",
            "task": name,
            "seed": options.seed,
            **given(size=options.problems),
        }
    table = _data_table(text, options.split) | given(limit=options.problems)
    return Path(text.rpartition(":")[2].partition("@")[0]).stem, table


def _data_table(text: str, split: str | None = None) -> dict[str, Any]:
    """The rows that a word names: a file by its suffix, a folder, or ``hub:ORG/NAME``."""
    if text.startswith("hub:"):
        return {"type": "hub", "dataset": text.removeprefix("hub:"), "split": split}
    if path_value(text).is_dir():
        return {"type": "hf", "path": text, "split": split}
    return file_rows(Path(text)).model_dump(include={"type", "path"})


def _score_with_reward_model(arguments: Sequence[str]) -> int:
    options, overrides = _REWARD_MODEL.read_some(arguments)
    if options.out is not None:
        check_new(options.out)
    config = _REWARD_MODEL.settings(
        ScoringConfig,
        options,
        overrides,
        data=_data_table(options.data, options.split) | given(limit=options.problems),
        chat=not options.no_chat,
    )
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
        for row in rows:
            file.write(json_text(given(**asdict(row))) + "\n")
            yield row
