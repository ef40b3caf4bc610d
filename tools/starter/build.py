"""What surrounds the recipe that makes the starter model: its text before, its card after.

    python -m tools.starter.build text runs/starter-text    # tokenizer, problems, pretraining text
    isobit sft recipes/starter.toml                         # random weights -> runs/starter/model
    python -m tools.starter.build card runs/starter         # figures and card beside the weights

The recipe takes the rows in their order, so that a step never sees a problem twice.  The same text,
recipe and number of threads give the same weights, bit for bit.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from isobit.config.load import build
from isobit.config.recipes import SftConfig
from isobit.models.folder import load_model
from isobit.starter.tasks import Problem, pretraining_answer, problems, question
from tools.starter.card import model_card
from tools.starter.figures import measure
from tools.starter.tokenizer import BOS_ID, EOS_ID, PAD_ID, build_tokenizer

CONTEXT = 512
"""Tokens that the tokenizer announces; the recipe's model holds as many."""
BATCHES, BATCH = 1000, 96
"""The recipe's steps, and prompts a step."""
SEED = 0
PROBLEMS = Path("starter:held_out.jsonl")
"""What the card's figures are measured on."""

Row = dict[str, str]


def write_text(folder: Path, batches: int = BATCHES) -> None:
    """The tokenizer, both sets of problems (``train.jsonl``, ``held_out.jsonl``) and a text about
    each of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(build_tokenizer(CONTEXT), folder)
    for name, held_out in (("train", False), ("held_out", True)):
        _write_rows(folder / f"{name}.jsonl", map(_problem, problems(held_out)))
    _write_rows(folder / "text.jsonl", pretraining_text(batches, SEED))
    random = Random(SEED + 1)  # noqa: S311 (draws a text, keeps no secret)
    _write_rows(
        folder / "held_out_text.jsonl",
        (_answered(problem, random) for problem in problems(held_out=True)),
    )


def pretraining_text(batches: int, seed: int) -> Iterator[Row]:
    """Rows of problems to train on, drawn anew for each batch of ``BATCH`` distinct ones, each with
    an answer of either style.
    """
    random = Random(seed)  # noqa: S311
    train = problems(held_out=False)
    for _ in range(batches):
        for problem in random.sample(train, BATCH):
            yield _answered(problem, random)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The tokenizer's files and ``generation_config.json``; the class is named as every release of
    transformers knows it.
    """
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )


def write_card(run: Path) -> None:
    """``README.md`` in the model's folder of a run of the recipe, with figures measured on the
    held-out problems.
    """
    manifest, summary = (
        json.loads((run / name).read_text(encoding="utf-8"))
        for name in ("run.json", "summary.json")
    )
    config = build(SftConfig, manifest["config"], str(run / "run.json"))
    model = load_model(run / "model", config.precision)
    figures = measure(model.policy, model.tokenizer, PROBLEMS)
    print(figures)
    card = model_card(
        model.policy.config,
        sum(master.numel() for master in model.policy.parameters()),
        figures,
        command="isobit sft recipes/starter.toml",
        updates=config.training.steps,
        batch=config.training.prompts_per_step,
        preset=config.precision.preset,
        minutes=summary["train_seconds"] / 60,
        threads=manifest["device"]["threads"],
    )
    (run / "model" / "README.md").write_text(card, encoding="utf-8")


def _problem(problem: Problem) -> Row:
    return {"prompt": question(problem), "answer": str(sum(problem))}


def _answered(problem: Problem, random: Random) -> Row:
    return {
        "prompt": question(problem),
        "completion": pretraining_answer(problem, random),
        "answer": str(sum(problem)),
    }


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.starter.build", description="Text and card of the starter model."
    )
    commands: Any = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="write tokenizer, problems and pretraining text")
    text.add_argument("folder", type=Path, help="for example runs/starter-text")
    card = commands.add_parser(
        "card", help="measure a run of recipes/starter.toml and write its model card"
    )
    card.add_argument("folder", type=Path, help="the run's directory")
    options = parser.parse_args(arguments)
    (write_text if options.command == "text" else write_card)(options.folder)


if __name__ == "__main__":
    main()
