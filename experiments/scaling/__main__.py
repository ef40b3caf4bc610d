"""What a step takes on 1 to 512 GPUs, simulated from what one and two H200s were measured to do.

    python -m experiments.scaling run [--shapes qwen3-8b ..] [--gpus 8 16 ..] [--seeds 2] --out DIR
    python -m experiments.scaling table DIR
    python -m experiments.scaling records

run      steps of 256 samples a GPU (weak) and of 2,048 in all (strong), responses of 2,048 tokens
         in the mean: a row for each number of GPUs, with one slot and with a slot a host, into
         DIR/simulated-fp8-SHAPE.jsonl
table    the rows of a folder; with --overview step times and efficiencies alone
records  host seconds a token for the records of samples that other ranks drew

``experiments/scaling/costs.py`` names every figure that this stands on.  Nothing here was
measured on more than two GPUs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from time import perf_counter

from benchmarks.common import read_rows, run_command
from experiments.scaling.costs import MODELS
from experiments.scaling.table import GPUS, Row, Scaling, markdown, overview, rows, title

SCALINGS: tuple[Scaling, ...] = ("weak", "strong")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("--shapes", nargs="+", choices=list(MODELS), default=list(MODELS))
    command.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    command.add_argument("--seeds", type=int, default=2)
    command.add_argument("--rollout-tp", type=int, default=1)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=simulate_all)
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.add_argument("--overview", action="store_true")
    command.set_defaults(run=print_tables)
    commands.add_parser("records").set_defaults(run=measure_records)
    return parser


def simulate_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    ranks = arguments.rollout_tp
    for shape in arguments.shapes:
        found = []
        for scaling in SCALINGS:
            model = replace(MODELS[shape], rollout_tp=ranks)
            gpus = [count for count in arguments.gpus if count % ranks == 0]
            found += rows(model, scaling, gpus, range(arguments.seeds))
        name = f"{shape}-rollout-tp-{ranks}" if ranks > 1 else shape
        path = arguments.out / f"simulated-fp8-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    print(overview(in_order(arguments.out)))


def print_tables(arguments: argparse.Namespace) -> None:
    found = in_order(arguments.directory)
    print(overview(found) if arguments.overview else tables(found))


def in_order(directory: Path) -> list[Row]:
    """The rows of a folder, models in the order of ``MODELS``."""
    order = list(MODELS)
    return sorted(
        read_rows(directory),
        key=lambda row: (order.index(row["shape"]), row.get("rollout_tp", 1)),
    )


def tables(found: Sequence[Row]) -> str:
    """A table for each model and kind of scaling."""
    groups = groupby(found, key=title)
    return "\n\n".join(f"**{name}**\n\n{markdown(list(group))}" for name, group in groups)


def measure_records(arguments: argparse.Namespace) -> None:
    """Sequences of 256 prompt and 2,048 response tokens, read from a message and judged."""
    import torch

    from isobit.parallel.world import decode, encode
    from isobit.records.sequence import TokenSequence
    from isobit.records.text import Completion
    from isobit.records.wire import completions_of, completions_value

    count, prompt, response = 256, 256, 2048
    columns = [
        (torch.randint(150_000, (response,)).tolist(), torch.rand(response).tolist())
        for _ in range(count)
    ]
    drawn = [TokenSequence.of_answer([0] * prompt, *one, [0] * response) for one in columns]
    message = encode(completions_value([Completion(one, "", "stop") for one in drawn]))
    began = perf_counter()
    for completion in completions_of(decode(message)):
        completion.sequence.with_columns(advantages=1.0)
    seconds = (perf_counter() - began) / (count * (prompt + response))
    print(json.dumps({"kind": "records", "seconds_a_token": seconds}))


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
