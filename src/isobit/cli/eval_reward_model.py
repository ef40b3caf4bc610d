"""``isobit eval --reward-model FOLDER --data FILE``: the scores of a reward model, of answers or of
pairs.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import (
    add_threads,
    check_new,
    given,
    positive,
    precision_value,
    set_threads,
    settings_from,
)
from isobit.cli.waiting import starting

if TYPE_CHECKING:
    from isobit.run.score import ScoredRow

FLAG = "--reward-model"


def run(arguments: Sequence[str]) -> int:
    """Score, write and print.  Raises IsobitError for anything that cannot be used."""
    options, overrides = _parser().parse_known_args(arguments)
    if options.out is not None:
        check_new(options.out)

    from isobit.config.commands import ScoringConfig

    config = settings_from(ScoringConfig, _values(options), overrides)
    set_threads(options)
    with starting():
        from isobit.run.score import describe, score_rows, summarise

    result = summarise(list(_written(score_rows(options.folder, config), options.out)))
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print(f"{config.precision.preset}: {describe(result)}")
    return 0


def _written(rows: "Iterable[ScoredRow]", out: Path | None) -> "Iterator[ScoredRow]":
    """The rows, each of them in the file ``out`` before the next is asked for."""
    if out is None:
        yield from rows
        return
    with out.open("x", encoding="utf-8", buffering=1) as file:
        for one in rows:
            line = {name: value for name, value in asdict(one).items() if value is not None}
            file.write(json.dumps(line) + "\n")
            yield one


def _values(options: Namespace) -> dict[str, Any]:
    kind = "hf" if Path(options.data).is_dir() else "jsonl"
    return {
        "precision": options.precision,
        "data": {"type": kind, "path": options.data, **given(limit=options.problems)},
        "chat": not options.no_chat,
    }


def _parser() -> ArgumentParser:
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
        type=Path,
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
        help="fp32, bf16, or fp8 (default)",
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
        type=Path,
        metavar="FILE.jsonl",
        help="write a line for each row there, as it is scored",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser
