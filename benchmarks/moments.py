"""Whether AdamW's smaller moments end where FP32 ones do, over thousands of steps and when
gradients fall tenfold midway.

    python -m benchmarks.learning text DIR          # reasoning-gym text for the decoder
    python -m benchmarks.moments quadratic [--seeds 10] --out RESULTS           # 2 minutes
    python -m benchmarks.moments decoder --text DIR [--seed 0] --out RESULTS    # a CPU or a GPU
    python -m benchmarks.moments table RESULTS

Weights are random at the start.  Runs of one seed differ in nothing but their moments, and the
table holds each against FP32's.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.comparison.command import run_command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("quadratic")
    command.add_argument("--seeds", type=int, default=10)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=quadratic)
    command = commands.add_parser("decoder")
    command.add_argument("--shape", default="tiny")
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the weights, of the order of the text and of the rounding",
    )
    command.add_argument("--steps", type=int, default=3000)
    command.add_argument("--learning-rate", type=float, default=1e-3)
    command.add_argument("--text", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=decoder)
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs, as in ``learning.py``.


def quadratic(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.moments import run_quadratics

    run_quadratics(arguments.seeds, arguments.out)


def decoder(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.moments import run_decoder

    run_decoder(
        arguments.shape,
        arguments.seed,
        arguments.steps,
        arguments.learning_rate,
        arguments.text,
        arguments.out,
    )


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.curves.moments import run_table

    run_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
