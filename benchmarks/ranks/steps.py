"""Whole steps of reinforcement learning on W ranks, by the loop of ``benchmarks.end_to_end``."""

from pathlib import Path
from typing import Any

from benchmarks.passes.timing import measured
from benchmarks.ranks.digests import master_digest, published_digest
from benchmarks.ranks.writing import RankRows
from benchmarks.rl_steps.cases import Case
from benchmarks.rl_steps.native import Loop
from isobit.models.shapes import model_shape
from isobit.parallel.world import World


def run_timed(
    world: World,
    mode: str,
    shape: str,
    case: Case,
    settings: dict[str, Any],
    out: Path,
    device: str = "cuda",
) -> None:
    """A row: one timed step behind a warm-up."""
    rows = RankRows(world, out, mode, shape)
    loop = Loop(mode, model_shape(shape), settings, case.length, device, world=world)
    row = measured(lambda: loop.time(case))
    rows.write(kind="step", sequences=case.sequences, new_tokens=case.new_tokens, **settings, **row)


def run_proof(
    world: World,
    mode: str,
    shape: str,
    case: Case,
    settings: dict[str, Any],
    out: Path,
    device: str = "cuda",
) -> None:
    """A row after each of three steps: digests of what was published, and of the completions; at
    the end of the masters, too.
    """
    rows = RankRows(world, out, mode, shape)
    loop = Loop(mode, model_shape(shape), settings, case.length, device, world=world)
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
