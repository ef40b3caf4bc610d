"""Forward and backward of a real model's shape on one Hopper GPU, without an optimiser: this trainer beside transformers.

    python benchmarks/training.py native --precision fp8 [--shape qwen3-8b] [--length 4096] [--sequences 2] [--recompute] --out DIR
    python benchmarks/training.py transformers [--length 4096] [--sequences 2] [--recompute] --out DIR
    python benchmarks/training.py table DIR

Packed sequences of one length, random tokens and weights, the loss a weighted sum of every token's log-probability; lm_head never holds
all logits at once, on neither side.  transformers trains in BF16 with PyTorch's attention (SDPA) and, with ``--recompute``, its gradient
checkpointing.  Model FLOPs a token are 6 P + 6 L H D layers, with P the parameters but the embedding, and L/2 keys a token.
"""

import argparse
import sys
from pathlib import Path

from comparison.command import run_command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    for name, run in (("native", native), ("transformers", peer)):
        command = commands.add_parser(name)
        command.add_argument("--shape", default="qwen3-8b")
        command.add_argument("--length", type=int, default=4096)
        command.add_argument("--sequences", type=int, default=2)
        command.add_argument("--recompute", action="store_true")
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "native":
            command.add_argument("--precision", choices=("bf16", "fp8-linear", "fp8"), required=True)
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs: a table needs no GPU.


def native(arguments: argparse.Namespace) -> None:
    from passes.native import make_pass
    from passes.timing import measure

    measure(lambda case: make_pass(arguments.precision, case), "native", arguments.precision, arguments)


def peer(arguments: argparse.Namespace) -> None:
    from passes.peer import make_pass
    from passes.timing import measure

    measure(make_pass, "transformers", "bf16", arguments)


def table(arguments: argparse.Namespace) -> None:
    from passes.table import run_table

    run_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
