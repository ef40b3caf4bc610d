"""One step of the engine over a ModelRunner: a forward, then a token for every sample that is up to
date, known at once.
"""

from collections.abc import Sequence

import torch

from isobit.rollout.native.batch import build_batch
from isobit.rollout.native.ready import Ready, distinct_rows, take_ready
from isobit.rollout.native.runner import ModelRunner
from isobit.rollout.native.sampler import check_finite, draws_of
from isobit.rollout.native.scheduler import Scheduler
from isobit.rollout.native.sequence import Sample
from isobit.rollout.progress import EngineStats


class DirectExecutor:
    """Carries out plans and waits for every result: no token is ever in flight."""

    def __init__(self, runner: ModelRunner, stats: EngineStats) -> None:
        self._runner = runner
        self.stats = stats

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """As the runner does it."""
        self._runner.copy_pages(sources, targets)

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
        decoded: Ready = []
        if plan:
            states = self._runner.forward(build_batch(plan, self._runner.page_tokens))
            if self._runner.version != version:
                # published during the forward: its result belongs to no version of the weights
                return
            scheduler.advance(plan)
            ends = torch.tensor([count for _, count in plan]).cumsum(0) - 1
            decoded = take_ready(plan, states, ends.tolist())
        fresh = scheduler.start()
        assert plan or scheduler.running, "an engine with work to do always finds some"
        self._draw([*decoded, *fresh], version)
        scheduler.remove_finished()

    def _draw(self, ready: Ready, version: int) -> None:
        if not ready:
            return
        samples = [sample for sample, _ in ready]
        states, rows = distinct_rows(ready)
        logits = self._runner.logits(states.hidden)
        check_finite(logits, rows, samples)
        drawn = self._runner.draw(logits, draws_of(rows, samples))
        routings: list[int | None] = [None] * len(samples)
        if states.routings is not None:
            routings = states.routings[rows].tolist()
        for sample, token_id, log_prob, routing in zip(
            samples, drawn.tokens.tolist(), drawn.log_probs.tolist(), routings, strict=True
        ):
            sample.accept(token_id, log_prob, version, routing)
        if drawn.truncated is not None:
            for sample, log_prob in zip(samples, drawn.truncated.tolist(), strict=True):
                sample.truncated_log_probs.append(log_prob)
        self.stats.generated_tokens += len(samples)
