"""Whole steps of reinforcement learning on one Hopper GPU, with the shape of a real model: ours
beside vLLM and transformers.

    python -m benchmarks.end_to_end native --precision fp8 [--cases 2k,8k] [--recompute mlp]
                                           [--tokens 16384] [--offload-moments]
                                           [--reference resident] [--speculation N] --out DIR
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

from benchmarks.cases import MODES, STEP_CASES
from benchmarks.common import (
    Commands,
    Row,
    names_of,
    print_by_card,
    read_rows,
    run_command,
    write_json,
)
from isobit.config.training import Recompute


def make_commands() -> Commands:
    commands = Commands(__doc__)
    native_command = commands.add("native", native)
    native_command.add_argument("--precision", choices=MODES, required=True)
    native_command.add_argument("--recompute", choices=get_args(Recompute), default="mlp")
    native_command.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    native_command.add_argument("--offload-moments", action="store_true")
    native_command.add_argument("--speculation", type=int, help="guesses behind a sequence")
    native_command.add_argument(
        "--reference", choices=("none", "resident", "offload"), default="none"
    )
    peer = commands.add("train-transformers", train_transformers)
    peer.add_argument(
        "--sequences", type=int, help="measure so many of the batch and scale; by default all"
    )
    for command in (native_command, commands.add("rollout-vllm", rollout_vllm), peer):
        command.add_argument(
            "--cases", type=names_of(STEP_CASES, "cases"), default=list(STEP_CASES)
        )
    commands.add_table(run_table)
    return commands


# Engines are imported when a command runs them: vLLM is not everywhere.


def native(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps import run_native

    keys = {
        "recompute": arguments.recompute,
        "tokens_per_microbatch": arguments.tokens,
        "offload_moments": arguments.offload_moments,
    }
    case = arguments.precision, arguments.shape, arguments.cases
    run_native(*case, keys, arguments.out, arguments.reference, arguments.speculation)


def rollout_vllm(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps import run_rollouts

    run_rollouts(arguments.shape, arguments.cases, arguments.out)


def train_transformers(arguments: argparse.Namespace) -> None:
    from benchmarks.rl_steps import run_training

    run_training(arguments.shape, arguments.cases, arguments.sequences, arguments.out)


PHASES = ("rollout", "old_log_probs", "forward", "backward", "optimiser", "publish")
HEADER = (
    "| case | engine | micro-batch | rollout s | old log-probs s | forward s | backward s | "
    "optimiser s | publish s | other s | "
    "training phase s | step s | training x outside | training x `bf16` | step x outside | "
    "differing | bytes changed | peak GiB |"
)
OUTSIDE = "vLLM BF16 + transformers BF16"
NOTE = (
    "A micro-batch is what its backward computes again, and its tokens at most. The training phase "
    "is all that is not rollout; `x` is how "
    "many times as fast. The outside line is the sum of two commands on one card: its weights' way "
    "to vLLM, and vLLM's sleeping and "
    "waking, are not counted."
)


def run_table(directory: Path) -> None:
    """Print the table, and write its lines to ``DIR/end-to-end-table.json``."""
    lines = make_lines([row for row in read_rows(directory) if row.get("kind") == "rl"])
    print_by_card("", (HEADER, "|---|---|---|" + "---:|" * 15), lines, _cells)
    print(NOTE)
    write_json(directory / "end-to-end-table.json", lines)


def make_lines(rows: list[Row]) -> list[Row]:
    """A line for each of our rows, for each baseline, and for each half of one that has no other on
    its card.

    Of repeated measurements the last one counts; a ratio is None where a card has nothing to
    compare with.
    """
    latest = {(*_place(row), _name(row)): row for row in rows}
    lines = _joined([row | {"name": name} for (*_, name), row in latest.items()])
    return sorted((line | _ratios(line, lines) for line in lines), key=_order)


def _joined(rows: list[Row]) -> list[Row]:
    """vLLM's and transformers' rows of one card and case become one line."""
    halves = {
        (row["part"], *_place(row)): row
        for row in rows
        if row["part"] != "whole" and "error" not in row
    }
    joined, used = [], set()
    for (part, *_), rollout in halves.items():
        training = halves.get(("training", *_place(rollout)))
        if part == "rollout" and training is not None:
            used |= {id(rollout), id(training)}
            whole = {"name": OUTSIDE + _scaled(training), "engine": "outside", "part": "whole"}
            whole["seconds"] = rollout["seconds"] + training["seconds"]
            whole["phases_s"] = rollout["phases_s"] | training["phases_s"]
            joined.append(training | whole)
    return [row for row in rows if id(row) not in used] + joined


def _ratios(line: Row, lines: list[Row]) -> Row:
    whole = [
        other
        for other in lines
        if other["part"] == "whole" and "error" not in other and _place(other) == _place(line)
    ]
    if line not in whole:
        whole = []
    outside = next((other for other in whole if other["engine"] == "outside"), None)
    ours = (other for other in whole if (other["engine"], other["mode"]) == ("native", "bf16"))
    bf16 = next(ours, None)
    return {
        "training_x_outside": outside and training_seconds(outside) / training_seconds(line),
        "training_x_bf16": bf16 and training_seconds(bf16) / training_seconds(line),
        "step_x_outside": outside and outside["seconds"] / line["seconds"],
    }


def training_seconds(line: Row) -> float:
    return line["seconds"] - line["phases_s"].get("rollout", 0.0)


def _name(row: Row) -> str:
    if row["engine"] != "native":
        return f"{row['engine']} BF16, {row['part']} alone{_scaled(row)}"
    guesses = row.get("speculation")
    return f"isobit `{row['mode']}`" + ("" if guesses is None else f", speculation {guesses}")


def _scaled(row: Row) -> str:
    """A remark where a part of the batch was measured for the whole."""
    measured, all_of_them = row.get("sequences_measured"), STEP_CASES[row["case"]].sequences
    return (
        ""
        if measured in (None, all_of_them)
        else f" (training scaled from {measured} of {all_of_them} sequences)"
    )


def _place(row: Row) -> tuple[str, str, str]:
    return row["shape"], row["case"], row["card"]["uuid"]


def _order(line: Row) -> tuple[object, ...]:
    return (
        line["shape"],
        line["card"]["uuid"],
        list(STEP_CASES).index(line["case"]),
        line["engine"] == "native",
        line["name"],
    )


def _cells(line: Row) -> list[str]:
    if "error" in line:
        return [line["case"], line["name"], line["error"]]
    phases = line["phases_s"]
    other = sum(seconds for name, seconds in phases.items() if name not in PHASES)
    times = [*(phases.get(name) for name in PHASES), other, training_seconds(line) or None]
    ratios = [line[key] for key in ("training_x_outside", "training_x_bf16", "step_x_outside")]
    differing = (
        f"{line['tokens_differing']:,} of {line['tokens_compared']:,}"
        if "tokens_compared" in line
        else "-"
    )
    changed = f"{line['weight_bytes_changed']:.1%}" if "weight_bytes_changed" in line else "-"
    peak = max((memory["peak_gib"] for memory in line.get("memory", {}).values()), default=None)
    microbatch = (
        f"{line['recompute']} {line['tokens_per_microbatch']:,}" if "recompute" in line else "-"
    )
    figures = [_figure(x, 1) for x in (*times, line["seconds"])] + [_figure(x, 2) for x in ratios]
    return [
        line["case"], line["name"], microbatch, *figures, differing, changed, _figure(peak, 0)
    ]  # fmt: skip


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
