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
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from benchmarks import cases
from benchmarks.cases import PassCase, parse_case
from benchmarks.common import (
    Commands,
    Row,
    RowWriter,
    markdown,
    measure_card,
    read_rows,
    run_command,
)
from benchmarks.rollout_engines import native_versions
from isobit.config.training import Recompute
from isobit.parallel.processes import joined
from isobit.parallel.world import World

PROOF = cases.StepCase(8, 8, 128, 512)


def make_commands() -> Commands:
    commands = Commands(__doc__)
    for run in (links, train, digests, step, split, proof):
        command = commands.add(run.__name__, in_world(run))
        if run in (train, digests):
            command.add_argument("case", type=parse_case)
            command.add_argument("--microbatches", type=int, default=8 if run is train else 3)
            command.add_argument("--by-nccl", action="store_true")
        else:
            command.add_argument("--precision", choices=cases.MODES, default="fp8")
        if run in (step, split, proof):
            command.add_argument("--recompute", choices=get_args(Recompute), default="mlp")
            command.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
        if run in (step, split):
            command.add_argument("--prompts", type=int, default=32)
        if run is step:
            command.add_argument("--weak", action="store_true")
    commands.add_table(run_table)
    return commands


Run = Callable[[World, argparse.Namespace], None]


def in_world(run: Run) -> Callable[[argparse.Namespace], None]:
    """``run`` in the world of its ranks, after rank 0 has measured its card."""

    def joined_run(arguments: argparse.Namespace) -> None:
        measure_first_card()
        with joined() as world:
            run(world, arguments)

    return joined_run


# ``benchmarks.ranks`` imports this module.


def links(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_links

    run_links(_sitting(world, arguments))


def train(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_training, without_copy_engines

    note = "NCCL's kernels" if arguments.by_nccl else "copy engines"
    if arguments.by_nccl:
        without_copy_engines()
    run_training(world, _case(arguments), arguments.microbatches, arguments.out, note)


def digests(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_digests

    run_digests(world, _case(arguments), arguments.microbatches, arguments.out)


def step(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_timed

    prompts = arguments.prompts * (world.size if arguments.weak else 1)
    case = replace(cases.STEP_CASES["2k"], prompts=prompts)
    run_timed(_sitting(world, arguments), case, _settings(arguments))


def split(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_split

    case = replace(cases.STEP_CASES["2k"], prompts=arguments.prompts)
    run_split(_sitting(world, arguments), case, _settings(arguments))


def proof(world: World, arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import run_proof

    run_proof(_sitting(world, arguments), PROOF, _settings(arguments))


def _sitting(world: World, arguments: argparse.Namespace) -> "Sitting":
    return Sitting(world, arguments.precision, arguments.shape, arguments.out)


def _case(arguments: argparse.Namespace) -> PassCase:
    return replace(arguments.case, shape=arguments.shape)


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {"recompute": arguments.recompute, "tokens_per_microbatch": arguments.tokens}


_cards: list[Row] = []


def measure_first_card() -> None:
    """On rank 0, before it has anything on a card: a fork measures."""
    if os.environ.get("RANK", "0") == "0":
        _cards.append(measure_card())


@dataclass(frozen=True, slots=True)
class Sitting:
    """What the measurements of one command have in common."""

    world: World
    mode: str
    shape: str
    out: Path
    device: str = "cuda"

    def rows(self) -> "RankRows":
        return RankRows(self.world, self.out, self.mode, self.shape)


class RankRows:
    """Appends to ``DIR/ranks-<mode>-<shape>.jsonl``; every rank measures, the first one writes."""

    def __init__(self, world: World, directory: Path, mode: str, shape: str) -> None:
        self._world, self._writer = world, None
        if world.rank == 0:
            versions = native_versions()
            card = _cards[0] if _cards else {}
            self._writer = RowWriter(directory, "ranks", mode, shape, card, versions)

    def write(self, **row: Any) -> None:
        if self._writer is not None:
            self._writer.write(ranks=self._world.size, **row)


NAMES = {
    "training": ("tokens_per_s", "round_s"),
    "step": ("rollout_tokens_per_s", "seconds"),
    "digests": ("published", "masters"),
    "proof": ("published", "completions"),
    "split": ("seconds",),
}


def run_table(directory: Path) -> None:
    """Print a line for everything that was measured with one rank and with several, and for a
    split beside the same step of ranks that do both.
    """
    rows = [row for row in read_rows(directory) if "error" not in row]
    bases = {_key(row): row for row in rows if row["ranks"] == 1}
    together = {_key(row): row for row in rows if row["ranks"] > 1 and row["kind"] == "step"}
    print("| what | ranks | base | ours | ratio |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        base = together.get(_key(row)) if row["kind"] == "split" else bases.get(_key(row))
        if row["ranks"] == 1 or base is None:
            continue
        for name, ours, theirs in _compared(row, base):
            if isinstance(ours, str):
                same = "equal" if ours == theirs else "DIFFERENT"
                cells = [theirs[:12], ours[:12], same]
            else:
                cells = [f"{theirs:,.3f}", f"{ours:,.3f}", f"{ours / theirs:.3f}"]
            print(markdown([name, str(row["ranks"]), *cells]))


def _key(row: Row) -> tuple[object, ...]:
    """What must agree for a comparison; a weak-scaled step has more sequences a rank."""
    kind, sequences = row["kind"], row.get("sequences")
    if kind in ("step", "split") and sequences is not None:
        sequences //= row["ranks"]
    kind = "step" if kind == "split" else kind
    sitting = row["card"].get("uuid")
    return sitting, kind, row["mode"], row["shape"], row.get("case"), row.get("step"), sequences


def _compared(row: Row, base: Row) -> list[tuple[str, Any, Any]]:
    """Triples of a name, our value and the baseline's."""
    kind = row["kind"]
    notes = (row.get("note"), f"recompute {row['recompute']}" if kind == "step" else None)
    note = "".join(f" ({one})" for one in notes if one)
    found = [(f"{kind} {name}{note}", row[name], base[name]) for name in NAMES.get(kind, ())]
    if kind == "step":
        ours = row["sequences"] / row["seconds"]
        theirs = base["sequences"] / base["seconds"]
        found.append((f"step sequences a second{note}", ours, theirs))
        if "phases_s" in row:  # on a GPU
            found.append((f"step training_s a sequence{note}", *map(_training_s, (row, base))))
    return found


def _training_s(row: Row) -> float:
    """Seconds a sample in forwards, backwards, optimiser and publication."""
    names = ("forward", "backward", "optimiser", "publish")
    return sum(row["phases_s"][name] for name in names) / row["sequences"]


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
