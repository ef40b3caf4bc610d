"""Which sequences take part in the next forward, with how many tokens, and who gives way when pages run out.

Samples are served in the order of arrival: every running sample arrived before every waiting one.  A step is

    plan     reserve pages for the running samples, then fill the token budget: decoding samples (one token each), samples that are
             recomputed after losing their pages, prompts of the samples next in line
    forward  (the engine's business; it ends in ``advance``)
    start    samples whose prompt is in the cache join the running ones

When a running sample finds no page, the latest arrival gives way: first a prompt that is held for waiting samples, then the last
running sample, which goes back to the front of the queue, keeps its tokens, and later computes K and V again.

Nothing waits for ever.  The first running sample can take the pages of everyone else, and its request was accepted because it
fits alone; so it advances in every step until it ends, and the next one is first.  Prompts are held from the first in line on, without
a gap, because a sample goes back into the queue only when no prompt is held; so with nothing running, the first in line either has its
prompt or finds the cache empty.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor

from isobit.kernels.kv_cache import PAGE_TOKENS
from isobit.rollout.pages import PageAllocator, pages_for
from isobit.rollout.progress import EngineStats
from isobit.rollout.sequence import CachedTokens, Sample, SharedPrompt

Plan = list[tuple[CachedTokens, int]]
"""The sequences of one forward and how many of its next tokens each one puts in."""


class Scheduler:
    """The queue, the running samples and their pages.

    Args:
        samples: all samples, in the order of arrival, those of one prompt side by side.
        allocator: the pages; all of them are free again when the last sample has finished.
        copy_page: copies the K and V of one page into another, in all layers.
        max_sequences: samples that decode at once.
        max_batched_tokens: tokens of one forward.
        stats: counters to fill.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        allocator: PageAllocator,
        copy_page: Callable[[int, int], None],
        max_sequences: int,
        max_batched_tokens: int,
        stats: EngineStats,
    ) -> None:
        self.waiting = deque(samples)
        self.running: list[Sample] = []
        self._held: list[SharedPrompt] = []  # prompts with pages: those of the first samples in line, in their order
        self._allocator = allocator
        self._copy_page = copy_page
        self._capacity = min(max_sequences, max_batched_tokens)  # so that every running sample can decode in every step
        self._max_batched_tokens = max_batched_tokens
        self._stats = stats

    @property
    def is_done(self) -> bool:
        """Whether every sample has finished."""
        return not (self.running or self.waiting)

    def plan(self) -> Plan:
        """The next forward; empty only if a sample can start without one."""
        self._reserve_for_running()
        plan: Plan = [(sample, 1) for sample in self.running if sample.remaining == 1]
        budget = self._max_batched_tokens - len(plan)
        for sample in self.running:
            if sample.remaining > 1 and budget > 0:
                budget -= self._add_chunk(plan, sample, budget)
        self._plan_prompts(plan, budget)
        return plan

    def advance(self, plan: Plan) -> None:
        """The forward of ``plan`` has been computed: its tokens are in the cache."""
        for sequence, count in plan:
            sequence.cached += count
        self._stats.forwards += 1

    def start(self) -> list[tuple[Sample, Tensor]]:
        """Let samples run whose prompt is in the cache, in order, while there is room.

        Returns those that have no token of their own yet, each with the hidden state [hidden] to draw its first one from.
        """
        fresh: list[tuple[Sample, Tensor]] = []
        while self.waiting and len(self.running) < self._capacity:
            sample = self.waiting[0]
            prompt, last_hidden = sample.prompt, sample.prompt.last_hidden
            if last_hidden is None:
                break
            wanted = pages_for(max(len(sample.tokens), prompt.cached + 1)) - len(prompt.pages) + 1  # one to copy a partial page into
            if self.running and wanted > self._allocator.num_free:
                break
            self.waiting.popleft()
            sample.start(self._allocator)
            self._stats.shared_pages += len(prompt.pages)
            self._stop_waiting(prompt)
            self._reserve(sample)  # can fail for the only running sample; then the next plan makes room for it
            self.running.append(sample)
            if sample.remaining == 0:
                fresh.append((sample, last_hidden))
        return fresh

    def remove_finished(self) -> list[Sample]:
        """Take the finished samples out and free their pages; returns them."""
        finished = [sample for sample in self.running if sample.finish_reason is not None]
        if finished:
            self.running = [sample for sample in self.running if sample.finish_reason is None]
            for sample in finished:
                sample.drop_pages(self._allocator)
        return finished

    def drop_all_pages(self) -> None:
        """Forget every K and V, because the weights that made them are gone; all samples go back into the queue."""
        while self._held:
            self._held.pop().drop_pages(self._allocator)
        while self.running:
            self._requeue_last()

    def _plan_prompts(self, plan: Plan, budget: int) -> None:
        """Fill the rest of the budget with the prompts of the samples that could start after this forward."""
        last = None
        for sample in islice(self.waiting, max(0, self._capacity - len(self.running))):
            prompt = sample.prompt
            if prompt is last or prompt.is_ready:
                continue
            if budget == 0 or not self._hold(prompt):
                break
            last = prompt
            count = self._add_chunk(plan, prompt, budget)
            budget -= count
            self._stats.prompt_tokens += count

    def _add_chunk(self, plan: Plan, sequence: CachedTokens, budget: int) -> int:
        count = min(budget, sequence.remaining)
        plan.append((sequence, count))
        self._stats.chunks += count < sequence.remaining
        return count

    def _hold(self, prompt: SharedPrompt) -> bool:
        """Reserve pages for a prompt, if they are there."""
        if prompt.pages:
            return True
        spare = 1 if self.running or self._held else 0  # its first sample needs a page beside it, unless it is alone
        if pages_for(len(prompt.tokens)) + spare > self._allocator.num_free:
            return False
        self._reserve(prompt)
        self._held.append(prompt)
        return True

    def _stop_waiting(self, prompt: SharedPrompt) -> None:
        """One sample less waits for ``prompt``; nobody waiting, its own hold on the pages ends."""
        prompt.waiting -= 1
        if prompt.waiting == 0:
            self._held.remove(prompt)
            prompt.drop_pages(self._allocator)

    def _reserve_for_running(self) -> None:
        for sample in tuple(self.running):  # preempting takes from the end, so what was reserved already stays
            while sample.pages and not self._reserve(sample):
                if self._held:
                    self._held.pop().drop_pages(self._allocator)
                else:
                    assert len(self.running) > 1, "a sample that is alone with the cache fits into it"
                    self._requeue_last()
                    self._stats.preemptions += 1

    def _reserve(self, sequence: CachedTokens) -> bool:
        """Make sure of pages for all tokens (at least one new one), held by nobody else where they will be written.

        Takes nothing and returns False if there are not enough free pages.
        """
        length = max(len(sequence.tokens), sequence.cached + 1)
        missing = pages_for(length) - len(sequence.pages)
        first_written = sequence.cached // PAGE_TOKENS
        copies = first_written < len(sequence.pages) and self._allocator.holders(sequence.pages[first_written]) > 1
        if missing + copies > self._allocator.num_free:
            return False
        if copies:
            page = self._allocator.allocate()
            self._copy_page(sequence.pages[first_written], page)
            self._allocator.release(sequence.pages[first_written])
            sequence.replace_page(first_written, page)
            self._stats.copied_pages += 1
        for _ in range(missing):
            sequence.add_page(self._allocator.allocate())
        return True

    def _requeue_last(self) -> None:
        sample = self.running.pop()
        self._stats.recomputed_tokens += max(0, sample.cached - len(sample.prompt.tokens))
        sample.drop_pages(self._allocator)
        sample.prompt.waiting += 1
        self.waiting.appendleft(sample)
