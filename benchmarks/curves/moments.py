"""Runs that differ in the format of AdamW's moments alone, and the table of their final losses
beside those with FP32 moments.

quadratic    ``curves.quadratic``, and FP32 moments with a slightly higher learning rate for
             comparison
decoder      a decoder learns reasoning-gym text as bytes in ``bf16``, from random weights; from the
             middle of the run on its gradients are a tenth.  They are not clipped: that would hide
             the fall
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any, get_args

from benchmarks.comparison.rows import Row, read_rows
from benchmarks.curves.quadratic import LAST, LEARNING_RATE, SIZE, descend
from benchmarks.curves.setting import make_writer
from benchmarks.curves.supervised import WARM_UP, held_out_loss, make_trainer, steps_of
from benchmarks.curves.table import markdown
from isobit.algorithms.objective import LossOutputs, Shares
from isobit.config.tables import Moments, TrainingConfig
from isobit.records.batch import PackedBatch, TokenScores
from isobit.training.supervised import SupervisedObjective, pack_pairs

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
"""Of a step of the decoder."""
SETTING = ("engine", "shape", "beta2")
"""What a row has in common with the one with FP32 moments that it is held against; the seed,
too.
"""


@dataclass(frozen=True, slots=True)
class ScaledObjective(SupervisedObjective):
    """The loss of the text, and so its gradients, times ``scale``."""

    scale: float

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """See ``SupervisedObjective``."""
        return LossOutputs(self.scale * SupervisedObjective.loss(self, scores, batch, shares).loss)


def run_quadratics(seeds: int, out: Path) -> None:
    """A row a run."""
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
