"""Isobit's forward, backward and optimiser step for a ``PassCase``, and how both sides are timed.

Phases are marks on a timeline, taken by CUDA events on a GPU.  A phase inside another one
interrupts it, so the phases of a step add up to the step.  Work that the host does not wait for
counts for the phase that launched it.

Cases are timed one after the other in one process: the median after a warm-up that compiles, and
the most memory that torch held.  A case that does not fit leaves a row that says so.
"""

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.cases import PassCase, flops, precision_of
from benchmarks.common import Row, RowWriter, allocate_in_pages, measure_card, versions
from benchmarks.rollout_engines import native_versions
from isobit.config.training import Recompute, TrainingConfig
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.training.supervised import SupervisedObjective
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError, OutOfMemoryError

Mark = tuple[str, Any]
"""The phase that begins, and the event or the time."""


class Phases:
    """Seconds by phase; what lies between phases is ``other``."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._inside = ["other"]
        self._marks: list[Mark] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the ``with`` block as phase ``name``."""
        self._inside.append(name)
        self._mark()
        try:
            yield
        finally:
            self._inside.pop()
            self._mark()

    def start(self) -> None:
        """Begin a new timeline."""
        self._marks.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._mark()

    def stop(self) -> dict[str, float]:
        """End the timeline; seconds of every phase that occurred."""
        self._mark()
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (name, began), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + self._between(began, ended)
        return seconds

    def _mark(self) -> None:
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = perf_counter()
        self._marks.append((self._inside[-1], now))

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) * 1e-3 if self._on_gpu else ended - began


WARM_UP, REPEATS = 2, 5
STEP_REPEATS = 3

Pass = Callable[[], None]
"""One forward and backward; the gradients add up."""
Step = Callable[[int], dict[str, float]]
"""One update over that many micro-batches; seconds by phase."""


def measure_passes(
    make: Callable[[PassCase], Pass], engine: str, cases: Sequence[PassCase], out: Path
) -> None:
    """Forward and backward of each case, without an optimiser."""
    _measure("pass", lambda case: time_pass(case, make(case)), engine, cases, out)


def measure_steps(
    make: Callable[[PassCase, int], Step],
    engine: str,
    cases: Sequence[PassCase],
    tokens: int,
    out: Path,
) -> None:
    """An update of at least ``tokens`` tokens of each case."""

    def time(case: PassCase) -> Row:
        count = -(-tokens // case.tokens)
        return time_step(case, make(case, count), count)

    _measure("step", time, engine, cases, out)


def time_pass(case: PassCase, one: Pass) -> Row:
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


def time_step(case: PassCase, one: Step, count: int) -> Row:
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


def transformers_versions() -> dict[str, str]:
    """The versions that rows of transformers depend on."""
    return versions() | {"transformers": importlib.metadata.version("transformers")}


def _measure(
    kind: str, time: Callable[[PassCase], Row], engine: str, cases: Sequence[PassCase], out: Path
) -> None:
    card, known = (
        measure_card(),
        native_versions() if engine == "native" else transformers_versions(),
    )
    allocate_in_pages()
    for case in cases:
        row = measured(lambda case=case: time(case))
        RowWriter(out, engine, case.mode, case.shape, card, known).write(
            kind=kind, **case.fields, **row
        )


def make_pass(case: PassCase, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    policy = _policy(case, device)
    ids, d_log_probs = case.token_ids().to(device), case.weights().to(device).view(-1)
    return lambda: add_gradients(policy, ids, d_log_probs, case.recompute)


@torch.no_grad()
def add_gradients(
    policy: Policy, ids: torch.Tensor, d_log_probs: torch.Tensor, recompute: Recompute
) -> None:
    """Forward and backward over sequences of one length, int64 [S, L] on the policy's device, whose
    loss has the gradient ``d_log_probs`` FP32 [S (L - 1)] by the log-probabilities of all tokens
    but the first of each.
    """
    sequences, length = ids.shape
    at, weights = torch.arange(ids.numel(), device=ids.device), policy.weights("training")
    whole = PackedPass(policy, ids.view(-1), at % length, (length,) * sequences, recompute)
    rows = at.view(sequences, -1)[:, :-1].reshape(-1)
    hidden = whole.forward()
    given = hidden.index_select(0, rows), ids[:, 1:].reshape(-1), torch.ones_like(d_log_probs)
    head = policy.decoder.lm_head
    head.token_log_probs(weights, *given)
    d_rows = head.backward(weights, policy.gradient, *given, d_log_probs)
    whole.backward(torch.zeros_like(hidden).index_copy_(0, rows, d_rows))


def make_step(case: PassCase, microbatches: int, device: str = "cuda") -> Step:
    """A trainer over random weights, with BF16 moments, and its step over so many micro-batches:
    the mean of -log p of all tokens.
    """
    config = TrainingConfig(moments="bf16", recompute=case.recompute)
    phases = Phases(on_gpu=device != "cpu")
    trainer = Trainer(_policy(case, device), config, total_updates=1000, timing=phases)
    batches = case.batches(microbatches)

    def one(count: int) -> dict[str, float]:
        phases.start()
        metrics = trainer.update(batches[:count], SupervisedObjective())
        seconds = phases.stop()
        assert metrics.skipped is None, metrics.skipped
        return seconds

    return one


def _policy(case: PassCase, device: str) -> Policy:
    return random_policy(case.config, precision_of(case.mode), seed=0, device=device)
