"""The quickstart with several seeds in several precisions: greedy accuracy on the held-out problems
before and after, and its differences to the first precision's, paired by seed.

    python -m benchmarks.quickstart [--seeds 3] [--precisions bf16 fp8] [--moments fp32] [--device
    cpu] [--out FILE.json]
    python -m benchmarks.quickstart --table FILES.json ...
    python -m benchmarks.quickstart --kv-table FILES.json ...

Each run is the recipe as shipped, in a process of its own, with another seed: other prompts first,
other samples; AdamW's moments are those of the recipe unless others are asked for.  A precision is
a preset, or ``PRESET:CALIBRATION`` for one with scales of Q, K and V a tensor.  A row is a run's
``summary.json``, what it ran on (the processor, or the card with its versions) and, of the metrics
of its steps, the mean of those in ``MEANS`` and the largest of ``LARGEST``.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import make_parser, write_json
from isobit.util.machine import processor_name

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
MEANS = ("log_prob_diff/mean", "mismatch/k3", "time/calibration_s")
LARGEST = "kv_scales/largest_ratio"


def run(precision: str, moments: str, seed: int, device: str, directory: Path) -> dict[str, Any]:
    """Run the recipe in a process of its own; returns its summary, with figures of its metrics."""
    output = directory / f"{precision}-{moments}-{seed}"
    preset, _, calibration = precision.partition(":")
    command = [sys.executable, "-m", "isobit.cli.main", "train", str(RECIPE)]
    command += ["--precision", preset, "--training.moments", moments, "--seed", str(seed)]
    if calibration:
        command += ["--precision.kv_scales", "per_tensor", "--precision.kv_calibration"]
        command += [calibration]
    command += ["--device", device, "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    means = {name: mean(step.get(name, 0.0) for step in steps) for name in MEANS}
    largest = max(step.get(LARGEST, 0.0) for step in steps)
    return json.loads((output / "summary.json").read_text()) | means | {LARGEST: largest}


def describe_device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": processor_name()}
    from benchmarks.rollout_engines import describe_card

    return describe_card()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each precision and kind of moments, in markdown."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["precision"], row["moments"]), {})[row["seed"]] = row
    first = next(iter(found.values()))
    lines = [
        "| precision | moments | seeds | after | minus the first | differing | seconds of steps |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (precision, moments), runs in found.items():
        after = mean(100 * run["accuracy_after"] for run in runs.values())
        pairs = [
            100 * (runs[seed]["accuracy_after"] - first[seed]["accuracy_after"])
            for seed in runs.keys() & first.keys()
        ]
        apart = "-" if runs is first else f"{mean(pairs):+.2f}"
        if runs is not first and len(pairs) > 1:
            apart += f" ± {stdev(pairs) / sqrt(len(pairs)):.2f}"
        compared = (sum(run[f"tokens_{what}"] for run in runs.values()) for what in _COUNTED)
        differing = " of ".join(f"{count:,}" for count in compared)
        seconds = mean(run["train_seconds"] for run in runs.values())
        cells = (precision, moments, len(runs), f"{after:.2f}%", apart, differing, f"{seconds:.1f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


_COUNTED = ("differing", "compared")


def kv_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each precision, beside the first of the same preset, in markdown."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["precision"], {})[row["seed"]] = row
    lines = [
        "| flow | scales of Q, K, V | seeds | after | minus a token | differing | mean abs(d) | k3 "
        "| largest ratio | calibration a step |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for precision, runs in found.items():
        preset, _, calibration = precision.partition(":")
        own, base = list(runs.values()), found[preset]
        pairs = [
            100 * (runs[seed]["accuracy_after"] - base[seed]["accuracy_after"])
            for seed in runs.keys() & base.keys()
        ]
        apart = f"{mean(pairs):+.2f}" if calibration else "-"
        if calibration and len(pairs) > 1:
            apart += f" ± {stdev(pairs) / sqrt(len(pairs)):.2f}"
        cells = (
            f"`{preset}`",
            f"a tensor, `{calibration}`" if calibration else "a token",
            len(runs),
            f"{mean(100 * run['accuracy_after'] for run in own):.2f}%",
            apart,
            " of ".join(f"{sum(run[f'tokens_{what}'] for run in own):,}" for what in _COUNTED),
            f"{mean(run[MEANS[0]] for run in own):.4f}",
            f"{mean(run[MEANS[1]] for run in own):.5f}",
            f"{max(run[LARGEST] for run in own):.2f}" if calibration else "-",
            f"{1000 * mean(run[MEANS[2]] for run in own):.0f} ms" if calibration else "-",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--moments", nargs="+", default=["fp32"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files")
    parser.add_argument("--kv-table", type=Path, nargs="+", help="the table of kv_scales")
    arguments = parser.parse_args()
    if (paths := arguments.table or arguments.kv_table) is not None:
        files = (json.loads(file.read_text(encoding="utf-8")) for file in paths)
        show = table if arguments.table is not None else kv_table
        print(show([row for rows in files for row in rows]))
        return
    place, results = describe_device(arguments.device), []
    print(
        f"{'precision':12} {'moments':8} {'seed':>4} {'before':>7} {'after':>7} "
        f"{'differing of compared':>24} {'train s':>8}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for precision, moments in product(arguments.precisions, arguments.moments):
            runs: list[dict[str, Any]] = []
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                summary = run(precision, moments, seed, arguments.device, Path(directory))
                case = {"precision": precision, "moments": moments, "seed": seed}
                runs.append(case | place | summary)
                tokens = f"{summary['tokens_differing']} of {summary['tokens_compared']}"
                accuracy = f"{summary['accuracy_before']:7.1%} {summary['accuracy_after']:7.1%}"
                print(
                    f"{precision:12} {moments:8} {seed:4} {accuracy} {tokens:>24} "
                    f"{summary['train_seconds']:8.0f}",
                    flush=True,
                )
            results += runs
    print(table(results))
    write_json(arguments.out, results)


if __name__ == "__main__":
    main()
