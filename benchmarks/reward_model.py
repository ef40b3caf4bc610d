"""Reward models in FP8 and BF16: the agreement of their scores with FP32, and their speed.

    python -m benchmarks.reward_model agreement [--trained-in fp8,bf16] [--steps 600] --out DIR
    python -m benchmarks.reward_model speed --precision fp8|bf16 [--shape qwen3-8b]
        [--sequences 256] [--length 2048] [--tokens 16384] --out DIR

agreement   on a CPU, in minutes: a reward model is trained from the starter on pairs of right and
            wrong sums (``tools.starter.preferences``), and scores the answers of held-out pairs in
            FP32, BF16 and FP8.  Rank agreement is Kendall's tau-b over all answers, and the share
            of pairs that are ranked as in FP32; the error is the root mean square of score - FP32's
            over the standard deviation of FP32's scores.
speed       on a card: random weights of a real model's shape score sequences of random tokens;
            seconds from the ids on the host to the scores on the host, the median of three.
            ``--device cpu --shape tiny`` tries the command out.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.comparison.command import run_command

PRECISIONS = ("fp32", "bf16", "fp8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("agreement")
    command.add_argument("--trained-in", type=precisions, default=["fp8", "bf16"])
    command.add_argument("--steps", type=int, default=600)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--threads", type=int, default=2)
    command.set_defaults(run=agreement)
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("speed")
    command.add_argument("--precision", choices=("bf16", "fp8"), required=True)
    command.add_argument("--shape", default="qwen3-8b")
    command.add_argument("--sequences", type=int, default=256)
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--tokens", type=int, default=16384, help="of a forward")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=speed)
    return parser


def precisions(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: the precisions are {', '.join(PRECISIONS)}"
        )
    return names


# What a command needs is imported when it runs: the agreement needs no GPU.


def agreement(arguments: argparse.Namespace) -> None:
    from benchmarks.reward_models.agreement import measure_agreement

    for trained_in in arguments.trained_in:
        measure_agreement(
            trained_in, arguments.steps, arguments.seed, arguments.threads, arguments.out
        )


def speed(arguments: argparse.Namespace) -> None:
    from benchmarks.reward_models.speed import Work, measure_speed

    work = Work(
        arguments.precision,
        arguments.shape,
        arguments.sequences,
        arguments.length,
        arguments.tokens,
    )
    measure_speed(work, arguments.device, arguments.out)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
