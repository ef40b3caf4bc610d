"""Whole steps of reinforcement learning on W ranks, by the loop of ``benchmarks.end_to_end``."""

from typing import Any

from benchmarks.passes.timing import measured
from benchmarks.ranks.digests import master_digest, published_digest
from benchmarks.ranks.writing import Sitting
from benchmarks.rl_steps.cases import Case
from benchmarks.rl_steps.native import Loop
from isobit.models.config import model_shape


def run_timed(sitting: Sitting, case: Case, settings: dict[str, Any]) -> None:
    """A row: one timed step behind a warm-up."""
    rows, loop = sitting.rows(), _loop(sitting, case, settings)
    row = measured(lambda: loop.time(case))
    rows.write(kind="step", sequences=case.sequences, new_tokens=case.new_tokens, **settings, **row)


def run_proof(sitting: Sitting, case: Case, settings: dict[str, Any]) -> None:
    """A row after each of three steps: digests of what was published, and of the completions; at
    the end of the masters, too.
    """
    rows, loop = sitting.rows(), _loop(sitting, case, settings)
    for step in range(1, 4):
        figures = loop.step(case)
        rows.write(
            kind="proof",
            step=step,
            sequences=case.sequences,
            new_tokens=case.new_tokens,
            **figures,
            published=published_digest(loop.policy),
            masters=master_digest(loop.policy) if step == 3 else None,
        )


def _loop(sitting: Sitting, case: Case, settings: dict[str, Any]) -> Loop:
    shape, world = model_shape(sitting.shape), sitting.world
    return Loop(sitting.mode, shape, settings, case.length, sitting.device, world=world)
