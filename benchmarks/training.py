"""Training of a real model's shape on one Hopper GPU, this trainer beside transformers: forward and
backward, and whole updates.

    python -m benchmarks.training pass native CASE... [--shape qwen3-8b] --out DIR
    python -m benchmarks.training pass transformers CASE... --out DIR
    python -m benchmarks.training step native CASE... [--tokens 65536] --out DIR
    python -m benchmarks.training step transformers CASE... --out DIR
    python -m benchmarks.training table DIR

for example with ``fp8:4096x2:none bf16:4096x2:none fp8:16384x1:mlp bf16:16384x1:full``.  A case
is PRECISION:LENGTHxSEQUENCES:RECOMPUTE, the sequences being those of a micro-batch; one process
measures them one after the other, and goes on where the memory does not hold one.  Packed sequences
of one length, random tokens and weights; lm_head never holds all logits at once, on neither side.

pass    forward and backward of a micro-batch without an optimiser, gradients added to those that
        are there; the loss is a weighted sum of every token's log-probability.  Model FLOPs a token
        are 6 P + 12 (L / 2) H D layers, with P the parameters of a token but the embedding.
step    the micro-batches of ``--tokens`` tokens or more, then clip, AdamW with BF16 moments over
        FP32 masters, and publication; the loss is the mean of -log p.  Ours is ``Trainer.update``;
        what transformers does is said in ``passes.peer``.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.comparison.command import run_command
from benchmarks.passes.cases import Case, check_peer, parse_case

ENGINES = ("native", "transformers")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    for name, run in (("pass", one_pass), ("step", step)):
        command = commands.add_parser(name)
        command.add_argument("engine", choices=ENGINES)
        command.add_argument(
            "cases", nargs="+", type=parse_case, metavar="PRECISION:LENGTHxSEQUENCES:RECOMPUTE"
        )
        command.add_argument("--shape", default="qwen3-8b")
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "step":
            command.add_argument("--tokens", type=int, default=65536, help="of a step, at least")
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs: a table needs no GPU.


def one_pass(arguments: argparse.Namespace) -> None:
    from benchmarks.passes import native, peer
    from benchmarks.passes.timing import measure_passes

    make = native.make_pass if arguments.engine == "native" else peer.make_pass
    measure_passes(make, arguments.engine, _cases(arguments), arguments.out)


def step(arguments: argparse.Namespace) -> None:
    from benchmarks.passes import native, peer
    from benchmarks.passes.timing import measure_steps

    make = native.make_step if arguments.engine == "native" else peer.make_step
    measure_steps(make, arguments.engine, _cases(arguments), arguments.tokens, arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.passes.table import run_table

    run_table(arguments.directory)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    cases = [replace(case, shape=arguments.shape) for case in arguments.cases]
    if arguments.engine == "transformers":
        check_peer(cases)
    return cases


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
