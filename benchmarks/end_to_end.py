"""Whole steps of reinforcement learning on one Hopper GPU, with the shape of a real model: ours
beside vLLM and transformers.

    python -m benchmarks.end_to_end native --precision fp8 [--cases 2k,8k] [--recompute mlp]
                                           [--tokens 16384] [--offload-moments]
                                           [--reference resident] --out DIR
    python -m benchmarks.end_to_end rollout-vllm [--cases 2k,8k] --out DIR   # needs vLLM
    python -m benchmarks.end_to_end train-transformers [--cases 2k,8k] [--sequences 32] --out DIR
    python -m benchmarks.end_to_end table DIR

``2k`` is 32 prompts x 8 samples of exactly 2,048 new tokens, ``8k`` 8 prompts x 8 samples of 8,192;
prompts are 256 random tokens, weights and rewards random.  A step is rollout, the log-probabilities
of the old policy where they are another function's, forward and backward of the whole batch, AdamW
with BF16 moments over FP32 masters, and publication.  One step is timed after a warm-up, its phases
by CUDA events. Each row may have its fastest setting, as transformers has.  What 139 GiB hold of
the 8B shape, as whole sequences:

    2k    fp8 --recompute none --tokens 6912     bf16 --recompute none --tokens 4608
    8k    fp8 --recompute mlp --tokens 16896     bf16 --recompute mlp --tokens 8448

The outside baseline's halves do not fit a card together and are two commands; ``table`` adds them
up where both were measured on one card. Each command appends its rows to a file of DIR as they
come, with the card's UUID.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

from benchmarks.comparison.command import run_command
from benchmarks.rl_steps.cases import CASES, case_names
from isobit.config.tables import Recompute


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    for name, run in (
        ("native", native),
        ("rollout-vllm", rollout_vllm),
        ("train-transformers", train_transformers),
    ):
        command = commands.add_parser(name)
        command.add_argument("--shape", default="qwen3-8b")
        command.add_argument("--cases", type=case_names, default=list(CASES))
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "native":
            command.add_argument(
                "--precision", choices=("bf16", "fp8-linear", "fp8"), required=True
            )
            command.add_argument("--recompute", choices=get_args(Recompute), default="mlp")
            command.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
            command.add_argument("--offload-moments", action="store_true")
            command.add_argument(
                "--reference", choices=("none", "resident", "offload"), default="none"
            )
        if name == "train-transformers":
            command.add_argument(
                "--sequences",
                type=int,
                help="measure so many of the batch and scale; by default all",
            )
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs: vllm is not everywhere, and a table needs no GPU.


def native(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps.native import run_native

    keys = {
        "recompute": arguments.recompute,
        "tokens_per_microbatch": arguments.tokens,
        "offload_moments": arguments.offload_moments,
    }
    run_native(
        arguments.precision,
        arguments.shape,
        arguments.cases,
        keys,
        arguments.out,
        arguments.reference,
    )


def rollout_vllm(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps.rollout_peer import run_rollouts

    run_rollouts(arguments.shape, arguments.cases, arguments.out)


def train_transformers(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps.training_peer import run_training

    run_training(arguments.shape, arguments.cases, arguments.sequences, arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps.table import run_table

    run_table(arguments.directory)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
