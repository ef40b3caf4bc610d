"""Does AdamW with BF16 or 8-bit moments end where FP32 moments end, after thousands of steps and
when gradients fall tenfold midway?

    python -m experiments.learning text DIR          # reasoning-gym text for the decoder
    python -m experiments.moments quadratic [--seeds 10] --out RESULTS           # 2 minutes
    python -m experiments.moments decoder --text DIR [--seed 0] --out RESULTS    # a CPU or a GPU
    python -m experiments.moments table RESULTS

quadratic    loss = mean over 512 parameters of c (w - minimum)^2, with c from 0.3 to 3; the
             gradient is c (w - minimum) + noise, a tenth of it from step 1,501 of 3,000 on, where
             the minimum moves too.  A second moment that cannot decay keeps the size of the first
             half's gradients, and all later steps are ten times too short.  FP32 moments with a
             slightly higher learning rate are there for comparison
decoder      a decoder learns reasoning-gym text as bytes in ``bf16`` from random weights; from the
             middle of the run on its gradients are a tenth, and not clipped, which would hide that

Runs of one seed differ in their moments alone, and the table compares each with FP32 moments.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any, get_args

import torch

from benchmarks.common import Row, read_rows, run_command
from experiments.curves import markdown
from experiments.learning import WARM_UP, held_out_loss, make_trainer, make_writer, steps_of
from isobit.algorithms.objective import LossOutputs, Shares
from isobit.config.training import Moments, TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.spec.optimiser import decode_second
from isobit.records.batch import PackedBatch, TokenScores
from isobit.training.optimiser import build_optimiser
from isobit.training.supervised import SupervisedObjective, pack_pairs


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("quadratic")
    command.add_argument("--seeds", type=int, default=10)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=quadratic)
    command = commands.add_parser("decoder")
    command.add_argument("--shape", default="tiny")
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the weights, of the order of the text and of the rounding",
    )
    command.add_argument("--steps", type=int, default=3000)
    command.add_argument("--learning-rate", type=float, default=1e-3)
    command.add_argument("--text", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=decoder)
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


def quadratic(arguments: argparse.Namespace) -> None:
    run_quadratics(arguments.seeds, arguments.out)


def decoder(arguments: argparse.Namespace) -> None:
    run_decoder(
        arguments.shape,
        arguments.seed,
        arguments.steps,
        arguments.learning_rate,
        arguments.text,
        arguments.out,
    )


def table(arguments: argparse.Namespace) -> None:
    run_table(arguments.directory)


STEPS = 3000
SIZE = 512
LAST = 200
"""Steps whose mean loss is a run's final one."""
LEARNING_RATE = 1e-2


def descend(
    moments: Moments, beta2: float, seed: int, learning_rate: float = LEARNING_RATE
) -> tuple[float, float]:
    """-> the mean loss of the last 200 steps, and the mean of v after the last."""
    config = TrainingConfig(learning_rate=learning_rate, beta2=beta2, moments=moments)
    curvature = torch.logspace(-0.5, 0.5, SIZE)
    minimum = _normal(seed)
    master = torch.nn.Parameter(minimum + 0.5)
    optimiser = build_optimiser({"master": master}, config, backend_of(master.device), seed)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        if step == STEPS // 2 + 1:
            minimum = minimum - 0.5
        distance = master.detach() - minimum
        slope = curvature * distance
        losses.append(float((slope * distance).mean()))
        master.grad = (1.0 if step <= STEPS // 2 else 0.1) * (
            slope + _normal((seed + 1) * 100_000 + step)
        )
        optimiser.step()
    state = optimiser.state[master]
    second = (
        decode_second(state["exp_avg_sq"], state["exp_avg_sq_scale"])
        if moments == "fp8"
        else state["exp_avg_sq"]
    )
    return sum(losses[-LAST:]) / LAST, float(second.float().mean())


def _normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


BETAS = (0.999, 0.95)
WAYS: tuple[tuple[Moments, float], ...] = (
    ("fp32", 1.0),
    ("fp32", 1.01),
    ("fp32", 1.02),
    ("bf16", 1.0),
    ("fp8", 1.0),
)
"""Of the quadratics: the moments, and the learning rate as a multiple of the plain one."""
TOKENS = 1024
"""Tokens of a step of the decoder."""
SETTING = ("engine", "shape", "beta2")
"""What a row has in common with the one with FP32 moments that it is held against; the seed,
too.
"""


@dataclass(frozen=True, slots=True)
class ScaledObjective(SupervisedObjective):
    """The loss of the text, and so its gradients, times ``scale``."""

    scale: float

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        return LossOutputs(self.scale * SupervisedObjective.loss(self, scores, batch, shares).loss)


def run_quadratics(seeds: int, out: Path) -> None:
    writer = make_writer(out, "quadratic", "fp32", str(SIZE))
    for beta2 in BETAS:
        for seed in range(seeds):
            for moments, rate in WAYS:
                loss, _ = descend(moments, beta2, seed, rate * LEARNING_RATE)
                writer.write(moments=moments, beta2=beta2, seed=seed, rate=rate, loss=loss)


def run_decoder(
    shape: str, seed: int, steps: int, learning_rate: float, text: Path, out: Path
) -> None:
    """A row a run.  Runs with one seed see the same batches and start from the same weights."""
    writer = make_writer(out, "decoder", "bf16", shape)
    for beta2 in BETAS:
        for moments in get_args(Moments):
            started_at = perf_counter()
            loss, held_out = _learn(shape, moments, beta2, seed, steps, learning_rate, text)
            figures = {
                "loss": loss,
                "held_out_loss": held_out,
                "steps": steps,
                "seconds": perf_counter() - started_at,
            }
            writer.write(moments=moments, beta2=beta2, seed=seed, rate=1.0, **figures)


def _learn(
    shape: str,
    moments: Moments,
    beta2: float,
    seed: int,
    steps: int,
    learning_rate: float,
    text: Path,
) -> tuple[float, float]:
    """-> the mean loss of the last steps, and that of the held-out rows."""
    config = TrainingConfig(
        steps=steps,
        tokens_per_microbatch=TOKENS,
        learning_rate=learning_rate,
        warmup_updates=min(WARM_UP, steps - 1),
        beta2=beta2,
        moments=moments,
        max_grad_norm=1e9,
    )
    trainer, losses = make_trainer(shape, "bf16", config, seed), list[float]()
    for step, pairs in enumerate(steps_of(text, config, seed)):
        scale = 1.0 if step < steps // 2 else 0.1
        losses.append(
            trainer.update(pack_pairs(pairs, TOKENS), ScaledObjective(scale)).metrics["loss"]
            / scale
        )
    return fmean(losses[-LAST:]), held_out_loss(trainer, text)


def run_table(directory: Path) -> None:
    """Print a line for each way of the moments."""
    print(markdown([table_line(rows) for rows in _groups(read_rows(directory)).values()]))


def _groups(rows: list[Row]) -> dict[tuple[Any, ...], list[tuple[Row, Row]]]:
    """By setting, moments and rate: the rows, each beside that of its seed with FP32 moments."""
    plain = {
        _values(row, *SETTING, "seed"): row
        for row in rows
        if (row["moments"], row["rate"]) == ("fp32", 1.0)
    }
    groups: dict[tuple[Any, ...], list[tuple[Row, Row]]] = {}
    for row in rows:
        groups.setdefault(_values(row, *SETTING, "moments", "rate"), []).append(
            (row, plain[_values(row, *SETTING, "seed")])
        )
    return groups


def _values(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def table_line(rows: list[tuple[Row, Row]]) -> Row:
    """Final losses over those with FP32 moments: their mean over the seeds, and its standard
    error.
    """
    line: Row = {name: rows[0][0][name] for name in (*SETTING, "moments", "rate")}
    line |= {"seeds": len(rows), "loss": fmean(row["loss"] for row, _ in rows)}
    for name in ("loss", "held_out_loss"):
        ratios = [row[name] / plain[name] for row, plain in rows if name in row]
        line |= {
            f"{name}_of_fp32": fmean(ratios) if ratios else None,
            f"{name}_error": _error(ratios),
        }
    return line


def _error(numbers: list[float]) -> float | None:
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
