"""Timing of cases, one after the other in one process: medians after a warm-up that compiles, and
the most memory that torch held.

A case that the memory does not hold gets a row that says so, and the next one is measured.
"""

import gc
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.comparison.card import measure_card, versions
from benchmarks.comparison.device import allocate_in_pages
from benchmarks.comparison.native import native_versions
from benchmarks.comparison.rows import Row, RowWriter
from benchmarks.passes.cases import Case, flops
from benchmarks.passes.phases import Phases
from isobit.util.errors import ConfigError, OutOfMemoryError

WARM_UP, REPEATS = 2, 5
STEP_REPEATS = 3

Pass = Callable[[], None]
"""One forward and backward; the gradients add up."""
Step = Callable[[int], dict[str, float]]
"""One update over that many micro-batches; seconds by phase."""


def measure_passes(
    make: Callable[[Case], Pass], engine: str, cases: Sequence[Case], out: Path
) -> None:
    """Forward and backward of each case, without an optimiser."""
    _measure("pass", lambda case: time_pass(case, make(case)), engine, cases, out)


def measure_steps(
    make: Callable[[Case, int], Step], engine: str, cases: Sequence[Case], tokens: int, out: Path
) -> None:
    """An update of at least ``tokens`` tokens of each case."""
    _measure(
        "step",
        lambda case: time_step(
            case, make(case, microbatches(case, tokens)), microbatches(case, tokens)
        ),
        engine,
        cases,
        out,
    )


def microbatches(case: Case, tokens: int) -> int:
    """Of a step of at least so many tokens."""
    return -(-tokens // case.tokens)


def time_pass(case: Case, one: Pass) -> Row:
    """The figures of a row."""
    phases, seconds = Phases(on_gpu=torch.cuda.is_available()), []
    for _ in range(WARM_UP + REPEATS):
        phases.start()
        one()
        seconds.append(sum(phases.stop().values()))
    seconds = seconds[WARM_UP:]
    middle = median(seconds)
    return {
        "seconds": middle,
        "all_seconds": seconds,
        "tokens_per_s": case.tokens / middle,
        "model_tflop_per_s": flops(case) / middle / 1e12,
        "peak_gib": peak_gib(),
    }


def time_step(case: Case, one: Step, count: int) -> Row:
    """The figures of a row; the warm-up is a step over one micro-batch, which makes the moments."""
    one(1)
    steps = [one(count) for _ in range(STEP_REPEATS)]
    seconds = [sum(step.values()) for step in steps]
    middle = median(seconds)
    return {
        "step_tokens": count * case.tokens,
        "seconds": middle,
        "all_seconds": seconds,
        "phases_s": {name: median(step[name] for step in steps) for name in steps[0]},
        "tokens_per_s": count * case.tokens / middle,
        "model_tflop_per_s": count * flops(case) / middle / 1e12,
        "peak_gib": peak_gib(),
    }


def measured(work: Callable[[], Row]) -> Row:
    """The figures, or what stands in their place where the memory does not hold the work; either
    way nothing of it is left.

    A plan that does not fit is refused with a ConfigError.
    """
    try:
        row = work()
    except (torch.OutOfMemoryError, OutOfMemoryError, ConfigError) as error:
        row = {
            "error": "refused" if isinstance(error, ConfigError) else "out of memory",
            "message": str(error).splitlines()[0],
        }
    free_memory()
    return row


def free_memory() -> None:
    """Give back what nobody holds any more, and count the peak from here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """The most that torch held since ``free_memory``."""
    return torch.cuda.max_memory_allocated() / 2**30


def peer_versions() -> dict[str, str]:
    """Of what transformers' rows depend on."""
    return versions() | {"transformers": importlib.metadata.version("transformers")}


def _measure(
    kind: str, time: Callable[[Case], Row], engine: str, cases: Sequence[Case], out: Path
) -> None:
    card, known = measure_card(), native_versions() if engine == "native" else peer_versions()
    allocate_in_pages()
    for case in cases:
        row = measured(lambda case=case: time(case))
        RowWriter(out, engine, case.mode, case.shape, card, known).write(
            kind=kind, **case.fields, **row
        )
