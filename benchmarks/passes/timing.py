"""Timing a forward and backward: the median of several, after two that compile and warm up; and the most memory that torch held."""

import argparse
from collections.abc import Callable
from statistics import median

import torch

from comparison.card import measure_card, versions
from comparison.rows import RowWriter
from passes.cases import Case, flops

WARM_UP, REPEATS = 2, 5

Pass = Callable[[], None]
"""One forward and backward; the gradients add up."""


def measure(make: Callable[[Case], Pass], engine: str, mode: str, arguments: argparse.Namespace) -> None:
    """Make the pass of the case that the arguments ask for, time it and write its row."""
    case = Case(arguments.shape, arguments.length, arguments.sequences, arguments.recompute)
    writer = RowWriter(arguments.out, engine, mode, case.shape, measure_card(), versions())
    one = make(case)
    seconds = [_seconds(one) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    middle = median(seconds)
    writer.write(
        length=case.length,
        sequences=case.sequences,
        recompute=case.recompute,
        seconds=middle,
        all_seconds=seconds,
        tokens_per_s=case.tokens / middle,
        model_tflop_per_s=flops(case) / middle / 1e12,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
    )


def _seconds(one: Pass) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    one()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3
