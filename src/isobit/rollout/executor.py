"""One step of the engine over a ModelRunner: a forward, then a token for every sample that is up to
date, known at once.  Sequences of other adapters have a forward of their own in the same step.

One step of the engine over a PipelineRunner: the host is a step behind the device, and the
device never waits for it.

    host     plan t, launch t | wait for the tokens of t - 1, let samples end | plan t + 1, launch
    device   [   step t - 1   ][                   step t                     ][    step t + 1 ...

Step t + 1 is planned and launched before the tokens of step t are known: the device feeds them to
itself.  The host knows how many there will be, ``in_flight``, and where K and V go; it does not
know whether one of them is a stop token.  A sample that stops is decoded once more for nothing, in
pages that are its own until the device is past it, and that token is dropped.

The host waits for all tokens before samples lose their pages: what is computed again starts from
tokens that it knows.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from isobit.memory.cache_size import PageAllocator
from isobit.rollout.engine import EngineStats, Handle
from isobit.rollout.runner import (
    ModelRunner,
    PendingTokens,
    PipelineRunner,
    Ready,
    build_batch,
    distinct_rows,
    draws_of,
    finite_rows,
    non_finite,
    place_of,
    take_ready,
)
from isobit.rollout.scheduler import Plan, Scheduler, by_adapter
from isobit.rollout.sequence import Sample, States
from isobit.util.errors import NonFiniteError


class DirectExecutor:
    """Carries out plans and waits for every result: no token is ever in flight."""

    def __init__(self, runner: ModelRunner, stats: EngineStats) -> None:
        self._runner = runner
        self.stats = stats

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """As the runner does it."""
        self._runner.copy_pages(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        """As the runner does it."""
        self._runner.clear_pages(pages)

    def settle(self) -> bool:
        """Nothing is in flight."""
        return False

    def forget(self, samples: Sequence[Sample]) -> None:
        """The runner knows no samples."""

    def step(self, scheduler: Scheduler, version: int) -> None:
        """One forward, and one token for every sample that is up to date then.  Nothing of it
        counts if weights change meanwhile.
        """
        plan = scheduler.plan()
        decoded: list[tuple[Sample, States]] = []
        if plan:
            parts = by_adapter(plan, lambda one: one[0].adapter)
            found = [
                self._runner.forward(build_batch(part, self._runner.page_tokens)) for part in parts
            ]
            if self._runner.version != version:
                # published during the forward: its result belongs to no version of the weights
                return
            scheduler.advance(plan)
            for part, states in zip(parts, found, strict=True):
                ends = torch.tensor([count for _, count in part]).cumsum(0) - 1
                decoded += take_ready(part, states, ends.tolist())
        fresh = scheduler.start()
        assert plan or scheduler.running, "an engine with work to do always finds some"
        self._draw([*decoded, *fresh], version)
        scheduler.remove_finished()

    def _draw(self, ready: Ready, version: int) -> None:
        if not ready:
            return
        states, rows = distinct_rows(ready)
        logits = self._runner.logits(states.hidden)
        samples, rows, logits, kept = _with_finite(logits, rows, [sample for sample, _ in ready])
        if not samples:
            return
        drawn = self._runner.draw(logits, draws_of(rows, samples))
        routings: list[int | None] = [None] * len(samples)
        if states.routings is not None:
            routings = states.routings[kept][rows].tolist()
        for sample, token_id, log_prob, routing in zip(
            samples, drawn.tokens.tolist(), drawn.log_probs.tolist(), routings, strict=True
        ):
            sample.accept(token_id, log_prob, version, routing)
        if drawn.truncated is not None:
            for sample, log_prob in zip(samples, drawn.truncated.tolist(), strict=True):
                sample.truncated_log_probs.append(log_prob)
        self.stats.generated_tokens += len(samples)


def _with_finite(
    logits: Tensor, rows: list[int], samples: list[Sample]
) -> tuple[list[Sample], list[int], Tensor, list[int]]:
    """The samples whose logits are finite, their rows among those that are left of FP32 logits
    [R, V], these logits, and the rows that they had. The other samples fail.
    """
    temperatures = torch.ones(logits.shape[0])
    temperatures[rows] = torch.tensor(
        [sample.prompt.request.sampling.log_prob_temperature for sample in samples]
    )
    finite = finite_rows(logits, temperatures.to(logits.device)).tolist()
    if all(finite):
        return samples, rows, logits, list(range(len(finite)))
    for row, sample in zip(rows, samples, strict=True):
        if not finite[row]:
            sample.fail(non_finite(logits[row], sample))
    kept = [row for row, is_finite in enumerate(finite) if is_finite]
    place_of_row = {row: place for place, row in enumerate(kept)}
    left = [(one, place_of_row[row]) for one, row in zip(samples, rows, strict=True) if finite[row]]
    return [one for one, _ in left], [place for _, place in left], logits[kept], kept


class PipelinedExecutor:
    """Carries out plans, one step ahead of the tokens that it knows."""

    def __init__(self, runner: PipelineRunner, stats: EngineStats) -> None:
        self._runner = runner
        self.stats = stats
        self._pending: tuple[PendingTokens, int] | None = (
            None  # of the last step, with the version of its weights
        )

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """As the runner does it."""
        self._runner.copy_pages(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        """As the runner does it."""
        self._runner.clear_pages(pages)

    def forget(self, samples: Sequence[Sample]) -> None:
        """The runner can give their places to others."""
        self._runner.forget(samples)

    def settle(self) -> bool:
        """Wait for the last step, if it has not been waited for, and accept its tokens."""
        return self._accept(self._take_pending())

    def step(self, scheduler: Scheduler, version: int) -> None:
        """Launch one step, then accept the tokens of the one before.  Nothing of this one counts if
        weights change meanwhile.
        """
        plan = scheduler.plan()
        samples, chunks = _split(plan)
        for part in by_adapter(samples, lambda one: one.adapter):
            self._runner.decode(part)
        parts = by_adapter(chunks, lambda one: one[0].adapter)
        prefilled = [(part, self._runner.prefill(part)) for part in parts]
        if self._runner.version != version:
            dropped = (
                self._runner.end_step()
            )  # its tokens belong to no version of the weights, those of the one before do
            self.settle()
            dropped.wait()
            return
        recomputed: list[tuple[Sample, States]] = []
        if plan:
            scheduler.advance(plan)
        for part, states in prefilled:
            recomputed += take_ready(part, states, range(len(part)))
        ready = [*recomputed, *scheduler.start()]
        if ready:
            self._runner.draw(ready)
        _count_in_flight(samples, ready)
        before = self._take_pending()
        assert plan or before or scheduler.running, "an engine with work to do always finds some"
        if plan or ready:
            self._pending = self._runner.end_step(), version
        self._accept(before)
        scheduler.remove_finished()

    def _take_pending(self) -> tuple[PendingTokens, int] | None:
        pending, self._pending = self._pending, None
        return pending

    def _accept(self, pending: tuple[PendingTokens, int] | None) -> bool:
        """Wait for the tokens of a step and give them to their samples; False without one."""
        if pending is None:
            return False
        tokens, version = pending
        for sample, token_id, log_prob, truncated_log_prob, routing in tokens.wait():
            sample.in_flight -= 1
            if sample.finish_reason is not None:
                continue  # drawn before it was known that the one before is the last
            if not isfinite(log_prob):
                why = f"the drawn token's log-probability is {log_prob}"
                sample.fail(
                    NonFiniteError(f"{place_of(sample)}: {why}, because logits are NaN or infinite")
                )
                continue
            sample.accept(token_id, log_prob, version, routing)
            if truncated_log_prob is not None:
                sample.truncated_log_probs.append(truncated_log_prob)
            self.stats.generated_tokens += 1
        return True


def _split(plan: Plan) -> tuple[list[Sample], Plan]:
    """The samples that the device can go on with, and what it has to be given tokens for."""
    samples: list[Sample] = []
    chunks: Plan = []
    for sequence, count in plan:
        if isinstance(sequence, Sample) and sequence.on_device:
            samples.append(sequence)
        else:
            chunks.append((sequence, count))
    return samples, chunks


def _count_in_flight(decoded: Sequence[Sample], ready: Ready) -> None:
    for sample in decoded:
        sample.in_flight += 1
    for sample, _ in ready:
        sample.in_flight += 1
        sample.on_device = True


PATIENCE = 8
"""Steps for which prompts wait for others where decoding is a captured graph (``Scheduler``)."""


class Works:
    """Books around a runner whose cache nobody uses yet."""

    def __init__(
        self,
        runner: ModelRunner | PipelineRunner,
        num_pages: int,
        max_sequences: int,
        max_batched_tokens: int,
        stats: EngineStats,
    ) -> None:
        self.runner = runner
        self._version = runner.version
        self._allocator = PageAllocator(num_pages, runner.page_tokens)
        ahead = isinstance(runner, PipelineRunner)
        self._executor = (
            PipelinedExecutor(runner, stats) if ahead else DirectExecutor(runner, stats)
        )
        sizes = max_sequences, max_batched_tokens
        self._scheduler = Scheduler(
            self._allocator, self._executor, *sizes, stats, PATIENCE if ahead else 0
        )

    @property
    def num_running(self) -> int:
        """Samples that have a place."""
        return len(self._scheduler.running)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._allocator.num_free

    @property
    def has_room(self) -> bool:
        """Whether a further sample would soon have a place and pages."""
        return self._scheduler.has_room

    def count_into(self, stats: EngineStats) -> None:
        """Fill these counters from now on."""
        self._executor.stats = self._scheduler.stats = stats

    def add(self, samples: Iterable[Sample]) -> None:
        """Put samples in line."""
        self._scheduler.add(samples)

    def remove(self, samples: Sequence[Sample]) -> None:
        """Take samples out, wherever they stand."""
        self._scheduler.remove(samples)
        self._allocator.drop_parked(sample.handle for sample in samples)
        self._settle_if_done()

    def drop_parked(self, handles: Iterable[Handle]) -> None:
        """These samples do not come back: forget what their turns have left."""
        self._allocator.drop_parked(handles)

    def step(self) -> None:
        """One step with the newest weights."""
        self.notice_weights()
        if not self._scheduler.is_done:
            self._executor.step(self._scheduler, self._version)
        self._settle_if_done()

    def notice_weights(self) -> None:
        """If weights were published since the last look, forget the K and V that others made."""
        if self._version == self.runner.version:
            return
        self._version = self.runner.version
        self._scheduler.stats.weight_changes += not self._scheduler.is_done
        self.drop_all_pages()

    def drop_all_pages(self) -> None:
        """Let all samples go back into the line, with their tokens; nothing stays parked."""
        self._scheduler.drop_all_pages()
        self._settle_if_done()

    def take_finished(self) -> list[Sample]:
        """The samples that have finished since the last call."""
        return self._scheduler.take_finished()

    def _settle_if_done(self) -> None:
        if self._scheduler.is_done:
            self._executor.settle()
            free, pages = self._allocator.num_free, self._allocator.num_pages
            assert free == pages, "nobody is left to hold a page"
