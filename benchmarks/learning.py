"""Whether a model of a real shape learns on a GPU: supervised on text in two flows, and by
reinforcement learning with nothing differing.

    python -m benchmarks.learning text DIR          # needs reasoning-gym, no GPU
    python -m benchmarks.learning sft --precision fp8 --text DIR [--seed 0] --out RESULTS
    python -m benchmarks.learning rl --shape qwen3-0.6b --steps 20 --out RESULTS
    python -m benchmarks.learning table RESULTS

``text`` writes DIR/train.jsonl and DIR/held_out.jsonl.  Weights are random at the start.  ``--shape
tiny`` runs everything on a CPU in a minute, for a look at the machinery.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.comparison.command import run_command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("text")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=text)
    for name, run, steps in (("sft", sft, 200), ("rl", rl, 20)):
        command = commands.add_parser(name)
        command.add_argument("--precision", choices=("bf16", "fp8-linear", "fp8"), default="fp8")
        command.add_argument("--shape", default="qwen3-0.6b")
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--learning-rate", type=float)
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "sft":
            command.add_argument("--text", type=Path, required=True)
            command.add_argument(
                "--seed", type=int, default=0, help="of the weights and of the order of the text"
            )
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs: reasoning-gym is not everywhere, and a table needs
# no GPU.


def text(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.text import write_text

    write_text(arguments.directory)


def sft(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.supervised import run

    run(
        arguments.shape,
        arguments.precision,
        arguments.steps,
        arguments.learning_rate,
        arguments.seed,
        arguments.text,
        arguments.out,
    )


def rl(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.reinforcement import run

    run(
        arguments.shape,
        arguments.precision,
        arguments.steps,
        arguments.learning_rate,
        arguments.out,
    )


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.table import run_table

    run_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
