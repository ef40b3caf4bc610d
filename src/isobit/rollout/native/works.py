"""What an engine makes, gives back and makes again: a runner with its cache, and the books of who
has which part of it.
"""

from collections.abc import Iterable, Sequence

from isobit.rollout.native.executor import DirectExecutor
from isobit.rollout.native.pages import PageAllocator
from isobit.rollout.native.pipeline import PipelinedExecutor
from isobit.rollout.native.runner import ModelRunner, PipelineRunner
from isobit.rollout.native.scheduler import Scheduler
from isobit.rollout.native.sequence import Sample
from isobit.rollout.progress import EngineStats


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
        self._executor = (
            PipelinedExecutor(runner, stats)
            if isinstance(runner, PipelineRunner)
            else DirectExecutor(runner, stats)
        )
        self._scheduler = Scheduler(
            self._allocator, self._executor, max_sequences, max_batched_tokens, stats
        )

    @property
    def num_running(self) -> int:
        """Samples that have a place."""
        return len(self._scheduler.running)

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
        self._settle_if_done()

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
        if not self._scheduler.is_done:
            self.drop_all_pages()
            self._scheduler.stats.weight_changes += 1

    def drop_all_pages(self) -> None:
        """Let all samples go back into the line, with their tokens."""
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
