"""The native engine's forwards and draws.

``DirectExecutor``, over a ModelRunner: a forward, then a token for every sample that is up to date,
known at once. Sequences of other adapters have a forward of their own in the same step.

``PipelinedExecutor``, over a PipelineRunner: the host is a step behind the device, and the device
never waits for it.

    host     plan t, launch t | wait for the tokens of t - 1, let samples end | plan t + 1, launch
    device   [   step t - 1   ][                   step t                     ][    step t + 1 ...

Step t + 1 is planned and launched before the tokens of step t are known: the device feeds them to
itself.  The host knows how many there will be, ``in_flight``, and where K and V go; it does not
know whether one of them is a stop token.  A sample that stops is decoded once more for nothing, in
pages that are its own until the device is past it, and that token is dropped.

The host waits for all tokens before samples lose their pages: what is computed again starts from
tokens that it knows.

It also waits before it plans a step with guesses, which stand behind known tokens, and behind such
a step, since it does not know how many of its tokens count (``Scheduler.wants_tokens``). The device
is idle meanwhile, for about ``WAIT_S``; the choice of guesses allows for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import isfinite
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from isobit.rollout.draws import (
    Ready,
    distinct_rows,
    draws_of,
    finite_rows,
    non_finite,
    place_of,
)
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.runner import (
    DrawnToken,
    ModelRunner,
    PendingTokens,
    PipelineRunner,
    build_batch,
)
from isobit.rollout.scheduler import Plan, by_adapter
from isobit.rollout.sequence import Sample, States
from isobit.util.errors import NonFiniteError

PATIENCE = 8
"""Steps for which prompts wait for others where decoding is a captured graph (``Scheduler``)."""

WAIT_S = 5e-4
"""Seconds, by estimate, in which the device has nothing to do where the host waits for its tokens
before it plans the next step.
"""
HOST_S = 2.5e-5
"""Seconds, by estimate, in which the host looks up a sample's guesses and plans with them; what
they take is learnt from steps that have guesses (``isobit.rollout.drafts``).
"""
ROWS_OF_TWICE = 40
"""Rows for which a CPU takes twice as long as for none: about what models of 2 to 60 million
parameters take in ``bf16``, ``fp8`` and ``int8``.
"""

Runner = TypeVar("Runner", ModelRunner, PipelineRunner)
Computed = list[tuple[Plan, States, Sequence[int]]]
"""Parts of a plan, the states of their tokens after a forward, and for each sequence the row of its
last token among these (``take_ready``).
"""


class Executor(ABC, Generic[Runner]):
    """Carries out plans on a runner, which is given back with ``release`` and made again when it is
    needed next.
    """

    patience = 0
    """Steps for which prompts wait for others (``Scheduler``)."""
    wait_s = host_s = 0.0
    """Those of ``isobit.rollout.drafts.StepTimes``."""

    @property
    def captures(self) -> int:
        """See ``isobit.rollout.drafts.StepTimes``."""
        return 0

    def now(self) -> float:
        """See ``isobit.rollout.drafts.StepTimes``."""
        return 0.0

    def __init__(
        self, runner: Runner, make_runner: Callable[[], Runner], stats: EngineStats
    ) -> None:
        self._runner: Runner | None = runner
        self._make_runner = make_runner
        self._version = runner.version
        self.stats = stats

    @property
    def has_runner(self) -> bool:
        """Whether there is a runner now."""
        return self._runner is not None

    @property
    def runner(self) -> Runner:
        """The runner; made now, with an empty cache, if it was given back."""
        if self._runner is None:
            self._runner = self._make_runner()
            self._version = self._runner.version
        return self._runner

    def release(self) -> None:
        """Give the runner and its cache back, which nobody uses."""
        self._runner = None

    def clear(self) -> None:
        """Forget all samples and everything in the cache, after an error."""
        if self._runner is not None:
            self._runner.clear()

    def take_weights(self) -> bool:
        """Compute with the newest weights from now on; whether they are others, so that K and V in
        the cache are worthless.
        """
        if self._runner is None or self._runner.version == self._version:
            return False
        self._version = self._runner.version
        return True

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy the K and V of pages in all layers."""
        self.runner.copy_pages(sources, targets)

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        """The same of carries."""
        self.runner.copy_carries(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        """Set the K and V of pages to zero in all layers."""
        self.runner.clear_pages(pages)

    @abstractmethod
    def verifies(self, sample: Sample) -> bool:
        """Whether the next forward can draw from rows of guesses behind a decoding sample."""

    @abstractmethod
    def step_seconds(self, rows: int, length: int) -> float:
        """See ``isobit.rollout.drafts.StepTimes``."""

    @property
    @abstractmethod
    def is_pending(self) -> bool:
        """Whether tokens of an earlier step are in flight."""

    @abstractmethod
    def settle(self) -> bool:
        """Accept all tokens that are in flight; False if there are none."""

    @abstractmethod
    def forget(self, samples: Sequence[Sample]) -> None:
        """These samples have ended, or have lost their pages."""

    @abstractmethod
    def forward(self, plan: Plan) -> Computed | None:
        """Put the tokens of a plan through the model; None where weights were published meanwhile:
        the result belongs to no version of them.
        """

    @abstractmethod
    def draw(self, ready: Ready) -> None:
        """Draw the next tokens of samples, after ``forward``."""

    def _accept_drawn(self, sample: Sample, tokens: Iterable[DrawnToken], version: int) -> None:
        """Accept the first of its tokens, and each further one while those before were guessed and
        did not end the sample: the row that it was drawn from is that of the guess.
        """
        draft, sample.draft, accepted = sample.draft, (), 0
        for place, drawn in enumerate(tokens):
            if place:
                if sample.finish_reason is not None or sample.tokens[-1] != draft[place - 1]:
                    break
                sample.cached += 1
                accepted += 1
            sample.accept(drawn.token_id, drawn.log_prob, version, drawn.routing)
            if drawn.truncated_log_prob is not None:
                sample.truncated_log_probs.append(drawn.truncated_log_prob)
        self.stats.generated_tokens += 1 + accepted
        self.stats.drafted_tokens += len(draft)
        self.stats.accepted_tokens += accepted


def executor_of(
    make_runner: Callable[[], ModelRunner | PipelineRunner], stats: EngineStats
) -> "DirectExecutor | PipelinedExecutor":
    """The executor for the runner that is made."""
    runner = make_runner()
    if isinstance(runner, PipelineRunner):
        return PipelinedExecutor(runner, cast(Callable[[], PipelineRunner], make_runner), stats)
    return DirectExecutor(runner, cast(Callable[[], ModelRunner], make_runner), stats)


class DirectExecutor(Executor[ModelRunner]):
    """Carries out plans and waits for every result: no token is ever in flight."""

    def verifies(self, sample: Sample) -> bool:
        return True

    def step_seconds(self, rows: int, length: int) -> float:
        """An estimate, in units of a step of no rows."""
        return 1 + rows / ROWS_OF_TWICE

    @property
    def is_pending(self) -> bool:
        return False

    def settle(self) -> bool:
        return False

    def forget(self, samples: Sequence[Sample]) -> None:
        """Nothing is forgotten: the runner knows no samples."""

    def forward(self, plan: Plan) -> Computed | None:
        runner, computed = self.runner, Computed()
        for part in by_adapter(plan, lambda item: item[0].adapter):
            states = runner.forward(build_batch(part, runner.page_tokens))
            ends = torch.tensor([count for _, count in part]).cumsum(0) - 1
            computed.append((part, states, ends.tolist()))
        return None if computed and runner.version != self._version else computed

    def draw(self, ready: Ready) -> None:
        """Draw a token for every sample that is up to date, and accept it; and those behind it, for
        as long as they were guessed.
        """
        if not ready:
            return
        states, rows = distinct_rows(ready)
        logits = self.runner.logits(states.hidden)
        samples, rows, logits, kept = _with_finite(logits, rows, [sample for sample, _ in ready])
        if not samples:
            return
        drawn = self.runner.draw(logits, draws_of(rows, samples))
        none: list[Any] = [None] * len(samples)
        truncated = none if drawn.truncated is None else drawn.truncated.tolist()
        routings = none if states.routings is None else states.routings[kept][rows].tolist()
        columns = drawn.tokens.tolist(), drawn.log_probs.tolist(), truncated, routings
        tokens = [DrawnToken(*row) for row in zip(samples, *columns, strict=True)]
        for sample, its in groupby(tokens, key=lambda token: token.sample):
            self._accept_drawn(sample, its, self._version)


def _with_finite(
    logits: Tensor, rows: list[int], samples: list[Sample]
) -> tuple[list[Sample], list[int], Tensor, list[int]]:
    """The samples whose logits are finite, their rows among those that are left of FP32 logits
    [R, V], these logits, and the rows that they had. The other samples fail; one with guesses is
    spoilt instead, since a guess may have made its neighbours read a NaN.
    """
    temperatures = torch.ones(logits.shape[0])
    temperatures[rows] = torch.tensor(
        [sample.prompt.request.sampling.log_prob_temperature for sample in samples]
    )
    finite = finite_rows(logits, temperatures.to(logits.device)).tolist()
    if all(finite):
        return samples, rows, logits, list(range(len(finite)))
    left_out = {sample: row for row, sample in zip(rows, samples, strict=True) if not finite[row]}
    for sample, row in left_out.items():
        if sample.draft:
            sample.spoil()
        else:
            sample.fail(non_finite(logits[row], sample))
    left = [pair for pair in zip(samples, rows, strict=True) if pair[0] not in left_out]
    kept = list(dict.fromkeys(row for _, row in left))
    place_of_row = {row: place for place, row in enumerate(kept)}
    return [one for one, _ in left], [place_of_row[row] for _, row in left], logits[kept], kept


class PipelinedExecutor(Executor[PipelineRunner]):
    """Carries out plans, one step ahead of the tokens that it knows."""

    patience, wait_s, host_s = PATIENCE, WAIT_S, HOST_S

    def __init__(
        self, runner: PipelineRunner, make_runner: Callable[[], PipelineRunner], stats: EngineStats
    ) -> None:
        super().__init__(runner, make_runner, stats)
        self._pending: tuple[PendingTokens, int] | None = None
        """The tokens of the last step, with the version of its weights."""
        self._decoded: Sequence[Sample] = ()
        """The samples that the last ``forward`` decoded."""
        self._is_launched = False
        """Whether the last ``forward`` had anything to compute."""

    def verifies(self, sample: Sample) -> bool:
        """Whether it goes on from a token that the host knows too."""
        return sample.on_device and sample.in_flight == 0

    @property
    def captures(self) -> int:
        return self.runner.captures

    def now(self) -> float:
        return self.runner.now()

    def step_seconds(self, rows: int, length: int) -> float:
        return self.runner.step_seconds(rows, length)

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def clear(self) -> None:
        super().clear()
        self._pending = None

    def forget(self, samples: Sequence[Sample]) -> None:
        """The runner can give their places to others."""
        if samples:
            self.runner.forget(samples)

    def settle(self) -> bool:
        """Wait for the last step, if it has not been waited for, and accept its tokens."""
        return self._accept(self._take_pending())

    def forward(self, plan: Plan) -> Computed | None:
        """Launch a step behind the one whose tokens are in flight."""
        runner = self.runner
        self._decoded, chunks = _split(plan)
        self._is_launched = bool(plan)
        for samples in by_adapter(self._decoded, lambda sample: sample.adapter):
            runner.decode(samples)
        parts = by_adapter(chunks, lambda item: item[0].adapter)
        computed: Computed = [(part, runner.prefill(part), range(len(part))) for part in parts]
        if runner.version == self._version:
            return computed
        dropped = runner.end_step()  # its tokens belong to no version of the weights
        self.settle()  # those of the step before do
        dropped.wait()
        return None

    def draw(self, ready: Ready) -> None:
        """Draw a token for every sample that is up to date, then accept the tokens of the step
        before.
        """
        if ready:
            self.runner.draw(ready)
        _count_in_flight(self._decoded, ready)
        before = self._take_pending()
        if self._is_launched or ready:
            self._pending = self.runner.end_step(), self._version
        self._accept(before)

    def _take_pending(self) -> tuple[PendingTokens, int] | None:
        pending, self._pending = self._pending, None
        return pending

    def _accept(self, pending: tuple[PendingTokens, int] | None) -> bool:
        """Wait for the tokens of a step and give them to their samples; False without one."""
        if pending is None:
            return False
        tokens, version = pending
        for sample, its in groupby(tokens.wait(), key=lambda drawn: drawn.sample):
            sample.in_flight -= 1
            if sample.finish_reason is not None:
                continue  # drawn before it was known that the one before is the last
            drawn = list(its)
            others = [one.log_prob for one in drawn if not isfinite(one.log_prob)]
            if not others:
                self._accept_drawn(sample, drawn, version)
            elif sample.draft:  # a guess may have made its neighbours read a NaN
                sample.spoil()
            else:
                why = f"the drawn token's log-probability is {others[0]}"
                sample.fail(
                    NonFiniteError(f"{place_of(sample)}: {why}, because logits are NaN or infinite")
                )
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
