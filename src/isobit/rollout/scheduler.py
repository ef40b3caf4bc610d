"""Which sequences take part in the next forward, with how many tokens, and who gives way when pages
run out.

Samples come and leave while others run.  They start in the order of the line, which is that of
arrival until more wait than can start; then the longest go first (``isobit.rollout.order``).  A
step is

    plan     reserve pages for the running samples, then fill the token budget: decoding samples
             (one token each), samples that are recomputed after losing their pages, prompts of the
             samples next in line
    forward  (the executor's business; it ends in ``advance``)
    start    samples whose prompt is in the cache join the running ones

On a device that launches each kernel by itself for prompts, and replays a captured step for what
decodes, a few prompt tokens take as long as several hundred, and all that decode wait for them.
There prompts and samples that come back start several at a time: while many others decode, they
wait for more of their kind, for ``patience`` steps at most.

When a running sample finds no page, tokens that are in flight are waited for first: a sample may
have ended.  Then the one that came last gives way: a prompt that is held for waiting samples, then
the sample that was the last to start, which goes back to the front of the line, keeps its tokens,
and later computes K and V again.

Of a model with delta rules a sequence needs a carry beside its pages, for what its open chunk has
come to (``isobit.kernels.spec.delta_rule``), and a second one to go on to the next chunk.  A prompt
that takes several forwards gets both with its pages.  A running sample that finds none takes one
that others have for guesses alone; or waits for a step in which one before it goes on, and so gives
its old one back; or makes room as for a page.  A sample that is alone takes two, and so many there
are.

Nothing waits for ever.  The first running sample can take the pages of everyone else, and its
request was accepted because it fits alone; so it advances in every step, or after ``patience``,
until it ends, and the next one is first.  With nothing running, the first in line either has its
prompt, or is given the pages of all prompts that are held for others; so some sample always runs,
and the first in line comes to run.  A sample is first in line after finitely many have started:
those that were in the line when it came, and those that came before the first of these had started
(``Sample.heat``).  Later ones stand behind it, but for samples that have started before, which are
as many as have run.  A sample that is taken out leaves the order of the others as it is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from isobit.memory.cache_size import PageAllocator
from isobit.rollout.drafts import Drafter
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.order import AnswerLengths, arranged
from isobit.rollout.reservations import PageStore, Reservations
from isobit.rollout.sequence import CachedTokens, Sample, SharedPrompt, States

Plan = list[tuple[CachedTokens, int]]
"""The sequences of one forward and how many of its next tokens each one puts in."""


Item = TypeVar("Item")

START_SHARE = 1 / 8
"""The share of the decoding samples at which as many waiting samples start at once."""
START_TOKENS = 512
"""Tokens of prompts and turns that start at once too: by estimate their arithmetic takes longer
than the launches.
"""


def by_adapter(items: Iterable[Item], adapter_of: Callable[[Item], str | None]) -> list[list[Item]]:
    """The items of a forward in parts of one adapter each, in the order of their first items."""
    parts: dict[str | None, list[Item]] = {}
    for item in items:
        parts.setdefault(adapter_of(item), []).append(item)
    return list(parts.values())


class PlanExecutor(PageStore, Protocol):
    """The part of an executor that the scheduler uses."""

    @property
    def is_pending(self) -> bool:
        """Whether tokens of an earlier step are in flight."""
        ...

    def settle(self) -> bool:
        """Accept all tokens that are in flight; False if there are none."""
        ...

    def forget(self, samples: Sequence[Sample]) -> None:
        """These samples have ended, or have lost their pages."""
        ...

    def verifies(self, sample: Sample) -> bool:
        """Whether the next forward can draw from rows of guesses behind a decoding sample."""
        ...


class Scheduler:
    """The queue, the running samples and their pages.

    Args:
        allocator: the pages; all of them are free again when the last sample has ended.
        executor: carries out the plans.
        max_sequences: samples that decode at once.
        max_batched_tokens: tokens of one forward.
        stats: counters to fill; others may take their place between two steps.
        lengths: what is known of answers; outlives the scheduler.
        drafter: guesses tokens that decoding samples may draw; None where none are to be.
        patience: forwards of decoding samples alone for which others wait to start together.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        executor: PlanExecutor,
        max_sequences: int,
        max_batched_tokens: int,
        stats: EngineStats,
        lengths: AnswerLengths,
        drafter: Drafter | None = None,
        patience: int = 0,
    ) -> None:
        self.stats = stats
        self._lengths, self._heat = lengths, 1
        self._drafter = drafter
        self._patience, self._waited = patience, 0
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self._finished: list[Sample] = []
        self._held: list[SharedPrompt] = []
        """Prompts with pages, in the order in which they got them."""
        self._allocator = allocator
        self._executor = executor
        self._capacity = min(
            max_sequences, max_batched_tokens
        )  # so that every running sample can decode in every step
        self._max_batched_tokens = max_batched_tokens
        self._reservations = Reservations(allocator, executor)
        self._has_carries = self._reservations.has_carries
        self._left_out: set[Sample] = set()
        """Running samples that the next forward goes without."""

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return not (self.running or self.waiting)

    @property
    def has_room(self) -> bool:
        """Whether a place, a page and a carry would be left if all that wait had started."""
        if len(self.running) + len(self.waiting) >= self._capacity:
            return False
        pages_for, wanted, seen = self._allocator.pages_for, 0, set[SharedPrompt]()
        carries = len(self.waiting)
        for sample in self.waiting:
            prompt = sample.prompt
            if prompt not in seen and not prompt.pages:
                wanted += pages_for(prompt.length)
                carries += 1
            seen.add(prompt)
            wanted += pages_for(sample.length + 1) - pages_for(prompt.length) + 1
        if self._has_carries and carries >= self._allocator.carries.num_free:
            return False
        return wanted < self._allocator.num_free

    @property
    def wants_tokens(self) -> bool:
        """Whether tokens in flight are to be known before the next plan: how many of a step with
        guesses will count nobody else knows, and guesses stand behind known tokens.
        """
        return self._drafter is not None and (
            self._drafter.has_guessed or self._drafter.is_worth_waiting(self.running, self._rooms)
        )

    def add(self, samples: Iterable[Sample]) -> None:
        """Put samples at the end of the line, or behind those who wait for the same prompt."""
        for sample in samples:
            self._check_parked(sample)
            sample.heat = self._heat
            self.waiting.insert(self._place_of(sample), sample)
            sample.prompt.waiting += 1
        if len(self.waiting) > self._places:
            self._arrange()

    def take_finished(self) -> list[Sample]:
        """The samples that have finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def remove(self, samples: Iterable[Sample]) -> None:
        """Take samples out, wherever they stand, and free what they alone hold.

        Between two steps; what the device was told to do for them may still run.
        """
        leaving = set(samples)
        running = [sample for sample in self.running if sample in leaving]
        self.running = [sample for sample in self.running if sample not in leaving]
        self._executor.forget(running)
        for sample in running:
            sample.drop_pages(self._allocator)
        for sample in [sample for sample in self.waiting if sample in leaving]:
            self._stop_waiting(sample.prompt)
        self.waiting = deque(sample for sample in self.waiting if sample not in leaving)

    def plan(self) -> Plan:
        """The next forward; empty only if a sample can start without one, or if a token in flight
        is the last of its sample.
        """
        if self._drafter is not None:
            self._drafter.begin_plan()
        self._reserve_for_running()
        decoding: list[Sample] = []
        behind: list[Sample] = []
        for sample in self.running:
            remaining = sample.remaining
            if sample in self._left_out:
                continue
            if remaining == 1:
                decoding.append(sample)
            elif remaining:
                behind.append(sample)
        plan: Plan = [(sample, 1) for sample in decoding]
        budget = self._max_batched_tokens - len(plan)
        if not self._starts_wait(len(plan), behind):
            for sample in behind:
                if budget > 0:
                    budget -= self._add_chunk(plan, sample, budget)
            budget = self._plan_prompts(plan, budget)
        self._plan_drafts(plan, decoding, budget)
        assert not self._reservations.is_copying, (
            "pages are copied as samples start, before anything is written"
        )
        self._reservations.clear()
        return plan

    def advance(self, plan: Plan) -> None:
        """The forward of ``plan`` has been computed: its tokens are in the cache."""
        for sequence, count in plan:
            sequence.cached += count - len(sequence.draft)
            if self._has_carries:
                is_prompt = isinstance(sequence, SharedPrompt)
                sequence.settle_carry(self._allocator, keeps=is_prompt and sequence.remaining > 0)
                if is_prompt and sequence.remaining == 0:
                    sequence.drop_next_carry(self._allocator)
        self.stats.forwards += 1

    def start(self) -> list[tuple[Sample, States]]:
        """Let samples run whose prompt is in the cache, in order, while there is room.

        Returns those that have no token of their own yet, each with the hidden state [hidden] to
        draw its first one from.
        """
        fresh: list[tuple[Sample, States]] = []
        while self.waiting and len(self.running) < self._capacity:
            sample = self.waiting[0]
            parked, last = self._allocator.parked(sample.handle), sample.prompt.last
            if parked is None and last is None:
                break
            if self.running and not self._can_start(sample):
                break
            self.waiting.popleft()
            if parked is not None:
                self._copy_pages()  # a prompt that nobody else waits for goes, with what is read
                sample.resume(self._allocator.take_parked(sample.handle))
                self.stats.kept_tokens += sample.cached
            else:
                sample.start(self._allocator)
                self.stats.shared_pages += len(sample.pages)
            self._stop_waiting(sample.prompt)
            sample.prompt.has_begun = True
            self._heat += sample.heat == self._heat
            self.running.append(sample)
            while sample.will_write and not self._reservations.reserve(
                sample
            ):  # only if it is alone: a prompt held for others has what it needs
                self._make_room()
            if parked is None and last is not None and sample.length == sample.prompt.length:
                fresh.append((sample, last))
        self._copy_pages()
        return fresh

    def remove_finished(self) -> None:
        """Take the finished samples out and free their pages, which are parked where they are
        expected back; those that are spoilt go back into the line.
        """
        for sample in [sample for sample in self.running if sample.is_spoilt]:
            self._requeue(sample)
        finished = [sample for sample in self.running if sample.finish_reason is not None]
        if finished:
            self.running = [sample for sample in self.running if sample.finish_reason is None]
            self._executor.forget(finished)
            self._finished += finished
            if self._drafter is not None:
                self._drafter.end(finished)
            for sample in finished:
                self._lengths.note(sample.handle, sample.length - sample.prompt.length)
                if sample.prompt.request.comes_back and sample.finish_reason == "stop":
                    sample.park_pages(self._allocator)
                else:
                    sample.drop_pages(self._allocator)
            self._arrange()

    def drop_all_pages(self) -> None:
        """Forget every K and V, because the weights that made them are gone; all samples go back
        into the queue.
        """
        self._executor.settle()
        self.remove_finished()
        self._let_prompts_go()
        while self.running:
            self._requeue(self.running[-1])
        self._allocator.drop_parked()

    def _arrange(self) -> None:
        """Bring the line into order, by what is known now."""
        if self.waiting:
            self.waiting = deque(arranged(self.waiting, self._lengths, self._allocator))

    def _check_parked(self, sample: Sample) -> None:
        """Keep what is parked under the name of a sample that comes if it is the K and V of its own
        tokens, for longer than those of samples that are not back yet; else drop it.
        """
        parked = self._allocator.parked(sample.handle)
        if parked is None:
            return
        is_own = parked.adapter == sample.adapter
        if is_own and sample.tokens[: len(parked.tokens)] == parked.tokens:
            self._allocator.keep_parked(sample.handle)
        else:
            self._allocator.drop_parked([sample.handle])

    def _place_of(self, sample: Sample) -> int:
        """The index in the line where a further sample belongs, with the heat of those there."""
        index = len(self.waiting)
        if sample.prompt.waiting:
            while self.waiting[index - 1].prompt is not sample.prompt:
                index -= 1
            sample.heat = self.waiting[index - 1].heat
        elif self._allocator.parked(sample.handle) and self._line_takes_parked_pages():
            sample.heat = 0
            is_parked = (self._allocator.parked(one.handle) is not None for one in self.waiting)
            index = next((at for at, found in enumerate(is_parked) if not found), index)
            while 0 < index < len(self.waiting) and (
                self.waiting[index - 1].prompt is self.waiting[index].prompt
            ):
                index -= 1
        return index

    def _line_takes_parked_pages(self) -> bool:
        """Whether pages or carries that are not parked run out before all that wait have
        started.
        """
        if self._has_carries and self._allocator.carries.num_unused <= len(self.waiting):
            return True
        left = self._allocator.num_unused
        for sample in self.waiting:
            left -= self._allocator.pages_for(sample.length + 1)
            if left < 0:
                return True
        return False

    def _can_start(self, sample: Sample) -> bool:
        """Whether there are pages for it, and carries: one for its next chunk, or to copy that of
        its prompt into.
        """
        if self._has_carries:
            parked = self._allocator.parked(sample.handle)
            wanted = 1 + (parked is not None and self._allocator.is_carry_idle(parked))
            if wanted > self._allocator.carries.num_free:
                return False
        return self._wanted(sample) <= self._allocator.num_free

    def _wanted(self, sample: Sample) -> int:
        """Free pages that a sample takes when it starts, with one to copy a partial page into."""
        parked = self._allocator.parked(sample.handle)
        if parked is not None:
            there = len(parked.pages) - self._allocator.num_idle(parked)
            return self._allocator.pages_for(sample.length) - there + 1
        prompt = sample.prompt
        length = max(sample.length, prompt.cached + 1)
        return self._allocator.pages_for(length) - len(prompt.pages) + 1

    def _starts_wait(self, decoding: int, behind: Sequence[Sample]) -> bool:
        """Whether the next forward has decoding samples alone."""
        starting = len(behind) + min(self._places, len(self.waiting))
        wait = self._waited < self._patience and 0 < starting < START_SHARE * decoding
        if wait:
            tokens = sum(sample.prompt.remaining for sample in self._first_of_prompts())
            wait = tokens + sum(sample.remaining for sample in behind) < START_TOKENS
        self._waited = self._waited + 1 if wait else 0
        return wait

    @property
    def _places(self) -> int:
        """Samples that may start."""
        return max(0, self._capacity - len(self.running))

    def _first_of_prompts(self) -> Iterator[Sample]:
        """The next waiting samples whose prompt still needs a prefill, one per prompt."""
        seen = set[SharedPrompt]()
        for sample in islice(self.waiting, self._places):
            prompt = sample.prompt
            if prompt in seen or prompt.is_ready or self._allocator.parked(sample.handle):
                continue
            seen.add(prompt)
            yield sample

    def _plan_prompts(self, plan: Plan, budget: int) -> int:
        """Fill the rest of the budget with the prompts of the samples that could start after this
        forward; what is left of it.
        """
        for sample in self._first_of_prompts():
            prompt = sample.prompt
            if budget == 0:
                break
            if not self._hold(prompt, budget):
                if self.running or sample is not self.waiting[0]:
                    break
                self._let_prompts_go()
                self._hold(prompt, budget)
            count = self._add_chunk(plan, prompt, budget)
            budget -= count
            self.stats.prompt_tokens += count
        return budget

    def _plan_drafts(self, plan: Plan, decoding: Sequence[Sample], budget: int) -> None:
        """Put guesses behind the decoding samples, which come first in the plan, within the rest of
        the budget.
        """
        if self._drafter is None:
            return
        if not self._executor.is_pending:
            self._put_drafts(self._drafter, plan, decoding, budget)
        if len(plan) == len(decoding):
            self._drafter.end_plan(decoding)

    def _put_drafts(
        self, drafter: Drafter, plan: Plan, decoding: Sequence[Sample], budget: int
    ) -> None:
        verifies = self._executor.verifies
        places = [place for place, sample in enumerate(decoding) if verifies(sample)]
        samples = [decoding[place] for place in places]
        rooms = [min(budget, room) for room in self._rooms(samples)]
        drafts = drafter.drafts(samples, rooms, decoding)
        for place, sample, draft in zip(places, samples, drafts, strict=True):
            if not draft or budget <= 0:
                continue
            count = min(len(draft), budget)
            if count > sample.reserved - len(sample.tokens):
                count = self._reserve_behind(sample, count)
            if count and self._has_carries:
                count = self._reservations.guesses_with_carry(sample, count)
            if count:
                sample.draft = draft[:count]
                plan[place] = sample, 1 + count
                budget -= count

    def _rooms(self, samples: Sequence[Sample]) -> list[int]:
        """Guesses for which each sample has pages, or gets one where all before it do."""
        rooms, free = list[int](), self._allocator.num_free
        most = self._drafter.most if self._drafter is not None else 0
        for sample in samples:
            # the last token that a sample may have is drawn from the row before it
            room = max(0, min(most, sample.max_length - sample.length - 1))
            if (there := max(0, sample.reserved - sample.length)) < room:
                if free > len(self.running):
                    free, there = free - 1, there + self._allocator.page_tokens
                room = min(room, there)
            rooms.append(room)
        return rooms

    def _reserve_behind(self, sample: Sample, count: int) -> int:
        """How many of ``count`` places behind a running sample's tokens have a page of its own; it
        gets one that others will not miss at once.
        """
        if sample.reserved < sample.length + count and self._allocator.num_free > len(self.running):
            sample.add_page(self._allocator.allocate())
            sample.reserved += self._allocator.page_tokens
        return min(count, sample.reserved - sample.length)

    def _add_chunk(self, plan: Plan, sequence: CachedTokens, budget: int) -> int:
        count = min(budget, sequence.remaining)
        if self._has_carries:
            count = self._reservations.with_carry(sequence, count)
        plan.append((sequence, count))
        self.stats.chunks += count < sequence.remaining
        return count

    def _hold(self, prompt: SharedPrompt, budget: int) -> bool:
        """Reserve pages for a prompt, if they are there; and a carry, or two where it takes several
        forwards, of ``budget`` tokens at first.
        """
        if prompt.pages:
            return True
        spare = (
            1 if self.running or self._held else 0
        )  # its first sample needs a page beside it, unless it is alone
        if self._allocator.pages_for(prompt.length) + spare > self._allocator.num_free:
            return False
        if self._has_carries:
            several = prompt.length > budget
            if 1 + several + spare > self._allocator.carries.num_free:
                return False
            if several:
                prompt.carry = self._allocator.allocate_carry()
        self._reservations.reserve(prompt)
        self._held.append(prompt)
        return True

    def _let_prompts_go(self) -> None:
        while self._held:
            self._held.pop().drop_pages(self._allocator)

    def _stop_waiting(self, prompt: SharedPrompt) -> None:
        """One sample less waits for ``prompt``; nobody waiting, its own hold on the pages ends."""
        prompt.waiting -= 1
        if prompt.waiting == 0 and prompt.pages:
            self._held.remove(prompt)
            prompt.drop_pages(self._allocator)

    def _reserve_for_running(self) -> None:
        """Preempting takes from the end, so what was reserved already stays.

        Where a carry alone is missing and another sample goes on to its next chunk in this step,
        after which it has an earlier carry to give back, the sample is left out of the step.
        """
        self._left_out.clear()
        if self._has_carries:
            for sample in self.running:  # guesses have been accepted since the last forward
                sample.settle_carry(self._allocator)
        goes_on = False
        for sample in [
            sample
            for sample in self.running
            if sample.remaining
            and (sample.cached >= sample.reserved or (self._has_carries and sample.lacks_carry))
        ]:
            while sample.pages and not self._reservations.reserve(sample):
                if goes_on and self._reservations.missing_pages(sample) <= self._allocator.num_free:
                    self._left_out.add(sample)
                    break
                if not self._take_carries_back():
                    self._make_room()
            has_next = sample.next_carry >= 0 and sample.begins_chunk
            goes_on = goes_on or (has_next and sample.remaining == 1)

    def _take_carries_back(self) -> bool:
        """Free the carries that running samples got for guesses alone; whether there were any."""
        spare = [
            sample for sample in self.running if sample.next_carry >= 0 and not sample.begins_chunk
        ]
        for sample in spare:
            sample.drop_next_carry(self._allocator)
        return bool(spare)

    def _make_room(self) -> None:
        """Free pages in the gentlest way that is left: wait for tokens in flight, let a prompt go,
        let the last sample that has started go.
        """
        assert not self._reservations.is_copying, (
            "pages are copied before anybody else can be given those that are read"
        )
        if self._executor.settle():
            self.remove_finished()
        elif self._held:
            self._held.pop().drop_pages(self._allocator)
        else:
            assert len(self.running) > 1, "a sample that is alone with the cache fits into it"
            self._requeue(self.running[-1])
            self.stats.preemptions += 1

    def _copy_pages(self) -> None:
        self.stats.copied_pages += self._reservations.copy()

    def _requeue(self, sample: Sample) -> None:
        self.running.remove(sample)
        assert sample.in_flight == 0, "a sample goes back with all its tokens known"
        self._executor.forget([sample])
        self.stats.recomputed_tokens += max(0, sample.cached - len(sample.prompt.tokens))
        sample.drop_pages(self._allocator)
        sample.prompt.waiting += 1
        sample.heat = 0
        self.waiting.appendleft(sample)
