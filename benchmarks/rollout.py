"""Rollout on one Hopper GPU: this engine, vLLM, and the floor under both, with the shape of a real
model and random weights.

    python -m benchmarks.rollout native --precision fp8 [--shape qwen3-8b] [--cases CASES] --out DIR
                                        [--tensor-parallel 2]     one engine on so many GPUs
    python -m benchmarks.rollout vllm --mode fp8 [--log-probs short,long] ... --out DIR
    python -m benchmarks.rollout floor --precision fp8 ... --out DIR
    python -m benchmarks.rollout table DIR          # markdown, and DIR/table.json

CASES are some of prefill,short,long,context.  ``vllm`` runs where vLLM can be imported, and takes
``context`` alone, in a call of its own.

Each command appends its rows to a file of DIR as they come, with the card's UUID, copy bandwidth
and versions; ``table`` compares rows of one card.  All requests of a case come at once, prompts are
random tokens, sampling is at temperature 1 over the full vocabulary, and every request gets exactly
its number of tokens.  Tokens a second are generated tokens over the time of the whole call, prompts
included; in ``prefill`` they are the prompts' tokens.  Startup is the time from the start of the
process to the first token.
"""

import argparse
import sys
from pathlib import Path
from time import perf_counter

from benchmarks.comparison.cases import CASES, MODES
from benchmarks.comparison.command import run_command

_STARTED_AT = perf_counter()  # startup counts from here: nothing heavy has been imported yet


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    for name, flag, run in (
        ("native", "--precision", native),
        ("vllm", "--mode", peer),
        ("floor", "--precision", floor),
    ):
        command = commands.add_parser(name)
        command.add_argument(flag, dest="mode", choices=MODES, required=True)
        command.add_argument("--shape", default="qwen3-8b")
        command.add_argument(
            "--cases",
            type=case_names,
            default=[case for case in CASES if name != "vllm" or case != "context"],
        )
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "native":
            command.add_argument(
                "--tensor-parallel",
                type=int,
                default=1,
                metavar="N",
                help="GPUs that share one engine",
            )
        if name == "vllm":
            command.add_argument(
                "--log-probs",
                type=case_names,
                default=[],
                metavar="CASES",
                help="these a second time, with log-probabilities",
            )
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


def case_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the cases are {', '.join(CASES)}")
    return names


# What a command needs is imported when it runs: vllm is not everywhere, and a table needs no GPU.


def native(arguments: argparse.Namespace) -> None:
    from benchmarks.comparison.native import run_native, run_shared

    case = arguments.mode, arguments.shape, arguments.cases, arguments.out, _STARTED_AT
    if arguments.tensor_parallel > 1:
        run_shared(*case, arguments.tensor_parallel)
    else:
        run_native(*case)


def peer(arguments: argparse.Namespace) -> None:
    from benchmarks.comparison.peer import run_peer

    run_peer(
        arguments.mode,
        arguments.shape,
        arguments.cases,
        arguments.log_probs,
        arguments.out,
        _STARTED_AT,
    )


def floor(arguments: argparse.Namespace) -> None:
    from benchmarks.comparison.floor import run_floor

    run_floor(arguments.mode, arguments.shape, arguments.cases, arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.comparison.table import run_table

    run_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
