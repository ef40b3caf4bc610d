"""Several GPUs of one host beside one of them: bytes, links, training and whole steps.

    RUN=python                                                     # one GPU, the baseline
    RUN="python -m torch.distributed.run --nproc-per-node 2"       # two, in the same sitting
    $RUN -m benchmarks.parallel links --out DIR
    $RUN -m benchmarks.parallel train fp8:4096x4:mlp [--microbatches 8] [--by-nccl] --out DIR
    $RUN -m benchmarks.parallel digests fp8:4096x2:mlp [--microbatches 3] --out DIR
    $RUN -m benchmarks.parallel step --precision fp8 --prompts 32 [--weak] --out DIR
    $RUN -m benchmarks.parallel split --precision fp8 --prompts 32 --out DIR    # two ranks
    $RUN -m benchmarks.parallel proof --precision fp8 --out DIR
    python -m benchmarks.parallel table DIR

links      a layer's gradient, its ordered sum and the published bytes, alone on the links
train      an update over the same micro-batches; ``--by-nccl`` leaves copy engines out
digests    SHA-256 of weights and masters after an update with a rank that idles in the last round
step       one step of 8 samples a prompt, 2,048 new tokens; ``--weak`` multiplies the prompts by
           the ranks
split      the same step with one rank that trains and one that samples the next batch beside it
proof      three steps of 64 samples of 512 tokens, and the SHA-256 of the weights after each
table      ratios of several ranks to one, and of a split to ranks that do both

Weights, prompts and rewards are random.  Rows are appended to DIR as they come.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from benchmarks.comparison.command import run_command
from benchmarks.passes.cases import Case, parse_case
from benchmarks.rl_steps import cases
from isobit.config.tables import Recompute
from isobit.parallel.processes import joined
from isobit.parallel.world import World

if TYPE_CHECKING:
    from benchmarks.ranks.writing import Sitting

PRECISIONS = ("bf16", "fp8-linear", "fp8")
PROOF = cases.Case(8, 8, 128, 512)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    for name, run in (
        ("links", links),
        ("train", train),
        ("digests", digests),
        ("step", step),
        ("split", split),
        ("proof", proof),
    ):
        command = commands.add_parser(name)
        command.add_argument("--shape", default="qwen3-8b")
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=in_world(run))
        if name in ("train", "digests"):
            command.add_argument("case", type=parse_case)
            command.add_argument("--microbatches", type=int, default=8 if name == "train" else 3)
            command.add_argument("--by-nccl", action="store_true")
        else:
            command.add_argument("--precision", choices=PRECISIONS, default="fp8")
        if name in ("step", "split", "proof"):
            command.add_argument("--recompute", choices=get_args(Recompute), default="mlp")
            command.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
        if name in ("step", "split"):
            command.add_argument("--prompts", type=int, default=32)
        if name == "step":
            command.add_argument("--weak", action="store_true")
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


def in_world(
    run: Callable[[World, argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    def joined_run(arguments: argparse.Namespace) -> None:
        from benchmarks.ranks.writing import measure_first_card

        measure_first_card()
        with joined() as world:
            run(world, arguments)

    return joined_run


def links(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.links import run_links

    run_links(_sitting(world, arguments))


def train(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.training import run_training

    note = "copy engines" if not arguments.by_nccl else "NCCL's kernels"
    if arguments.by_nccl:
        from benchmarks.ranks.by_nccl import without_copy_engines

        without_copy_engines()
    run_training(world, _case(arguments), arguments.microbatches, arguments.out, note)


def digests(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.training import run_digests

    run_digests(world, _case(arguments), arguments.microbatches, arguments.out)


def step(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.steps import run_timed

    prompts = arguments.prompts * (world.size if arguments.weak else 1)
    case = replace(cases.CASES["2k"], prompts=prompts)
    run_timed(_sitting(world, arguments), case, _settings(arguments))


def split(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.split import run_split

    case = replace(cases.CASES["2k"], prompts=arguments.prompts)
    run_split(_sitting(world, arguments), case, _settings(arguments))


def proof(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.steps import run_proof

    run_proof(_sitting(world, arguments), PROOF, _settings(arguments))


def table(arguments: argparse.Namespace) -> None:
    from benchmarks.ranks.table import run_table

    run_table(arguments.directory)


def _sitting(world: World, arguments: argparse.Namespace) -> "Sitting":
    from benchmarks.ranks.writing import Sitting

    return Sitting(world, arguments.precision, arguments.shape, arguments.out)


def _case(arguments: argparse.Namespace) -> Case:
    return replace(arguments.case, shape=arguments.shape)


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {"recompute": arguments.recompute, "tokens_per_microbatch": arguments.tokens}


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
