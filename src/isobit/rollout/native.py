"""The native engine: continuous batching over a paged KV cache, one forward a step over whatever is
there to do (a ``RolloutEngine``).

    schedule   the scheduler's plan: decoding samples, chunks of prompts
    forward    its tokens go through the model
    draw       a token for every sample whose last token is now in the cache

Then finished samples go.  Either a step waits for its tokens, or the host learns them while the
device computes the next step: what runs the model says which (``isobit.rollout.executor``).  New
samples join as soon as their prompt is there and leave their place when they end; nobody waits for
a batch to finish.

What a sample's tokens and log-probabilities are does not depend on any of that: rows of a forward
do not see each other, noise is keyed by the sample, and K and V computed again have the bits they
had.  Chunking, sharing, preemption, what else was asked for and the sizes in ``RolloutConfig``
change the time a sample takes, nothing else.

Weights are read where the policy publishes them, so a publication needs no word: each step compares
the version with that of the pages, and recomputes those if they differ.

Everything that can be known to fail is refused before it is taken on, with the numbers: every
sequence of an accepted request can run to its full length alone in the cache, which is why the
scheduler never gets stuck.  The runner and its cache can be given back; the next step makes them
again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import (
    CacheSize,
    PageAllocator,
    batched_tokens,
    choose_cache_size,
    out_of_memory_named,
)
from isobit.models.function import LogProbFunction, SampledPolicy, function_of
from isobit.precision.kv_scales import KvScales
from isobit.records.text import Completion
from isobit.rollout.drafts import drafter_of
from isobit.rollout.draws import take_ready
from isobit.rollout.engine import Follow, SampleEvent, parted
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.executor import executor_of
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.order import AnswerLengths
from isobit.rollout.requests import EngineLimits, Handle, Request, check_limits, requests_of
from isobit.rollout.runner import ModelRunner, PipelineRunner, PolicyRunner
from isobit.rollout.scheduler import Scheduler
from isobit.rollout.sequence import Sample, SharedPrompt
from isobit.util.errors import DataError, IsobitError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from isobit.rollout.sample_stream import SampleStream


def _check_calibrated(scales: KvScales | None) -> None:
    """Raises RequestError where a flow has scales of Q, K and V a tensor and none are set yet."""
    if scales is not None and not scales.is_set:
        raise RequestError(
            'precision.kv_scales is "per_tensor", and no scale is set yet: call '
            "isobit.calibrate_kv_scales(policy, prompts, tokens_per_batch) first"
        )


class NativeEngine:
    """Draws samples from the current weights of a policy.

    Args:
        policy: its rollout side is read.
        config: sizes of the batch and of the cache.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of the run; with prompt, visit and sample it fixes the noise.
        make_runner: what runs the model, from the policy and the size of the cache; by default
            that goes by the policy's device.
        size: of the cache; by default what ``config`` says, or what fits beside the policy.
    """

    sharing = None

    def __init__(
        self,
        policy: SampledPolicy,
        config: RolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        make_runner: Callable[[SampledPolicy, CacheSize], ModelRunner | PipelineRunner]
        | None = None,
        size: CacheSize | None = None,
    ) -> None:
        self._size = size or choose_cache_size(policy, config)
        self.stats = EngineStats()
        self._started_at = perf_counter()
        self._policy = policy
        self.max_sequences = config.max_sequences
        self._batched_tokens = batched_tokens(config, policy.backend.sizes)
        self._tokenizer = tokenizer
        self._seed = seed
        make_runner = make_runner or partial(_default_runner, max_sequences=config.max_sequences)
        self._live: dict[Handle, Sample] = {}
        """In the order of arrival."""
        self._streams: dict[Handle, SampleStream] = {}
        self._events: list[SampleEvent] = []
        """Events that the next step returns."""
        self._failed: dict[Handle, IsobitError] = {}
        """The samples that have failed alone since the last step."""
        with out_of_memory_named(self._policy.backend.memory):
            self._executor = executor_of(partial(make_runner, policy, self._size), self.stats)
        self._limits = EngineLimits(
            policy.config.max_positions,
            policy.config.vocab_size,
            self._size.pages,
            self._executor.runner.page_tokens,
            tokenizer is not None,
        )
        self._lengths = AnswerLengths()
        self._drafter = drafter_of(config.speculation, self._executor)
        self._allocator, self._scheduler = self._empty_cache()

    @property
    def function(self) -> LogProbFunction:
        """The function whose values the recorded log-probabilities are."""
        return function_of(self._policy, "rollout")

    @property
    def limits(self) -> EngineLimits:
        """The limits of the model and the cache."""
        return self._limits

    @property
    def free_pages(self) -> int:
        """Pages of the cache that nobody holds."""
        return self._allocator.num_free

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Samples that hold a place; the other live ones wait in line."""
        return len(self._scheduler.running)

    @property
    def has_room(self) -> bool:
        """Whether a further sample would soon have a place and pages."""
        return self._scheduler.has_room

    def figures(self) -> dict[str, Any]:
        """The pages of the cache and their tokens, and carries where there are any."""
        figures = {"kv_pages": self._limits.num_pages, "page_tokens": self._limits.page_tokens}
        return figures | ({"carries": self._size.carries} if self._size.carries else {})

    def notes(self) -> list[str]:
        """None: it reads what is published where it is."""
        return []

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with a RequestError, what can never be served, and what is live already."""
        check_limits(requests, self._limits, self._live)
        self._check_adapters(requests)

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on requests; a handle for each sample, in their order.  Nothing runs before a step.

        Raises:
            RequestError: as ``check`` does, where scales of Q, K and V are missing, and where text
                is to be followed without a tokenizer; then none of them is taken on.
        """
        self.check(requests)
        _check_calibrated(self._policy.weights("rollout").kv_scales)
        if follow == "text" and self._tokenizer is None:
            raise RequestError(
                "the text of samples cannot be followed: this engine has no tokenizer; follow "
                "their tokens"
            )
        if not self._live:
            self._begin_period()
        groups = [self._make_samples(request) for request in requests]
        samples = [sample for group in groups for sample in group]
        self._live.update((sample.handle, sample) for sample in samples)
        if follow != "end":
            tokenizer = self._tokenizer if follow == "text" else None
            self._streams.update((s.handle, SampleStream(s, tokenizer)) for s in samples)
        self._scheduler.add(samples)
        return [[sample.handle for sample in group] for group in groups]

    def step(self) -> list[SampleEvent]:
        """Put one forward through the model and draw a token for each sample that is up to date.

        An error of samples alone names them (``IsobitError.samples``) and ends them; what else has
        happened is told by the next step.  After any other no sample is live, and the engine can be
        asked again.

        Raises:
            NonFiniteError: if the model's output for a sample holds a NaN or an infinity.
            DataError: if the tokenizer cannot decode what was drawn.
            OutOfMemoryError: if the device has not the memory.
        """
        if self._live:
            with self._all_or_nothing():
                self._notice_weights()
                if self._executor.is_pending and self._scheduler.wants_tokens:
                    self._executor.settle()
                    self._scheduler.remove_finished()
                if not self._scheduler.is_done:
                    self._step()
                self._settle_if_done()
                self._collect()
            self.stats.seconds = perf_counter() - self._started_at
        if self._failed:
            failed, self._failed = self._failed, {}
            first = next(iter(failed.values()))
            first.samples = failed
            raise first
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        """Schedule, forward, draw.  Nothing of it counts if weights change meanwhile."""
        plan = self._scheduler.plan()
        computed = self._executor.forward(plan)
        if computed is None:
            return
        if plan:
            self._scheduler.advance(plan)
        known = [ready for chunk in computed for ready in take_ready(*chunk)]
        ready = [*known, *self._scheduler.start()]
        is_busy = plan or self._scheduler.running or self._executor.is_pending
        assert is_busy, "an engine with work to do always finds some"
        self._executor.draw(ready)
        self._scheduler.remove_finished()

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with the tokens so far; one that is in flight is dropped.

        Also frees the parked pages of samples that have already ended.
        """
        asked = set(handles)
        with self._all_or_nothing():
            leaving = [sample for handle, sample in self._live.items() if handle in asked]
            for sample in leaving:
                sample.finish_reason = "aborted"
            self._remove(leaving)
            self._allocator.drop_parked(asked)
            for sample in leaving:
                self._end(sample)
        for handle in asked:
            self._failed.pop(handle, None)
        events_of_asked, self._events = parted(self._events, asked)
        return events_of_asked

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn."""
        return len(self._live[handle].log_probs)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let samples go as they are; a token that is in flight is dropped, and drawn again where
        they go on.
        """
        asked = set(handles)
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        half_done = dict[Handle, Completion]()
        with self._all_or_nothing():
            for sample in leaving:
                sample.finish_reason = "aborted"  # here: what is in flight does not count
                half_done[sample.handle] = sample.completion(tokenizer=None)
                del self._live[sample.handle]
                self._streams.pop(sample.handle, None)
            _, self._events = parted(self._events, half_done)
            self._remove(leaving)
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples, which share the pages of their prompt with those that wait for
        it.

        Raises RequestError as the protocol says; then none of them is taken on.
        """
        asked = requests_of(half_done, requests, self._live)
        check_limits(list(asked.values()), self._limits)
        self._check_adapters(asked.values())
        if not self._live:
            self._begin_period()
        prompts = self._prompts_in_line()
        samples: list[Sample] = []
        for handle, completion in half_done.items():
            name = handle.prompt_id, handle.visit
            own = SharedPrompt(asked[name], self._limits.max_pages)
            prompt = prompts.setdefault(name, own)
            if (prompt.tokens, prompt.adapter) != (own.tokens, own.adapter):
                prompt = own  # an environment has opened it
            sample = self._make_sample(prompt, handle.sample)
            sample.take_up(completion)
            samples.append(sample)
        self._live.update((sample.handle, sample) for sample in samples)
        self._scheduler.add(samples)

    def take_weights(self) -> None:
        """Look now for a publication, which the next step would notice by itself."""
        with self._all_or_nothing():
            self._notice_weights()
            self._collect()

    def release(self) -> None:
        """Give the memory of the KV cache and of the captured graphs back to the device until the
        next step; the weights stay.

        They are made again at other addresses, with as many pages.  Live samples wait, and compute
        their K and V again.
        """
        if not self._executor.has_runner:
            return
        with self._all_or_nothing():
            self._drop_all_pages()
            self._collect()
            self._remove(list(self._live.values()))
        self._executor.release()  # the graphs hold addresses of the cache, and go with it
        self._allocator, self._scheduler = self._empty_cache()
        self._scheduler.add(self._live.values())
        if (memory := self._policy.backend.memory) is not None:
            memory.release_cached()

    def _check_adapters(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.adapter is not None and request.adapter not in self._policy.adapters:
                raise RequestError(
                    f"prompt {request.prompt.id!r} asks for the adapter {request.adapter!r}; the "
                    f"policy has {', '.join(map(repr, self._policy.adapters)) or 'none'}"
                )

    def _make_samples(self, request: Request) -> list[Sample]:
        prompt = SharedPrompt(request, self._limits.max_pages)
        return [self._make_sample(prompt, index) for index in range(request.samples)]

    def _make_sample(self, prompt: SharedPrompt, index: int) -> Sample:
        length = prompt.request.max_length(self._limits.context)
        return Sample(prompt, index, self._seed, length, self._limits.max_pages, self._tokenizer)

    def _prompts_in_line(self) -> dict[tuple[str, int], SharedPrompt]:
        """The prompts that samples wait for, by prompt and visit. A sample that comes while others
        of its prompt run brings the prompt again: these keep their places in the queue, should they
        lose their pages, and it has a later one.
        """
        prompts = (sample.prompt for sample in self._live.values())
        return {
            (prompt.request.prompt.id, prompt.request.visit): prompt
            for prompt in prompts
            if prompt.waiting
        }

    def _empty_cache(self) -> tuple[PageAllocator, Scheduler]:
        """The pages of a cache that nobody uses yet, and their scheduler."""
        size, page_tokens = self._size, self._limits.page_tokens
        allocator = PageAllocator(size.pages, page_tokens, size.carries)
        scheduler = Scheduler(
            allocator,
            self._executor,
            self.max_sequences,
            self._batched_tokens,
            self.stats,
            self._lengths,
            self._drafter,
            self._executor.patience,
        )
        return allocator, scheduler

    def _remove(self, samples: Sequence[Sample]) -> None:
        """Take samples out, wherever they stand."""
        if samples:
            self._scheduler.remove(samples)
            self._allocator.drop_parked(sample.handle for sample in samples)
            self._settle_if_done()

    def _notice_weights(self) -> None:
        """If weights were published since the last look, forget the K and V that others made."""
        if self._executor.take_weights():
            self.stats.weight_changes += not self._scheduler.is_done
            self._drop_all_pages()

    def _drop_all_pages(self) -> None:
        """Let all samples go back into the line, with their tokens; nothing stays parked."""
        self._scheduler.drop_all_pages()
        self._settle_if_done()

    def _settle_if_done(self) -> None:
        if self._scheduler.is_done:
            self._executor.settle()
            free, pages = self._allocator.num_free, self._allocator.num_pages
            assert free == pages, "nobody is left to hold a page"
            carries = self._allocator.carries
            assert carries.num_free == carries.count, "nobody is left to hold a carry"

    def _begin_period(self) -> None:
        self.stats, self._started_at = EngineStats(), perf_counter()
        self._executor.stats = self._scheduler.stats = self.stats

    def _collect(self) -> None:
        """Note what happened to the samples."""
        for sample in self._scheduler.take_finished():
            self._end(sample)
        for handle, stream in list(self._streams.items()):
            try:
                event = stream.event()
            except DataError as error:
                sample = self._live[handle]
                sample.fail(error)
                self._remove([sample])
                self._end(sample)
                continue
            if event is not None:
                self._events.append(event)

    def _end(self, sample: Sample) -> None:
        handle = sample.handle
        del self._live[handle]
        stream = self._streams.pop(handle, None)
        if sample.failure is None:
            try:
                completion = sample.completion(self._tokenizer)
                event = stream.event(completion) if stream is not None else None
                self._events.append(event or SampleEvent(handle, completion=completion))
            except DataError as error:
                sample.failure = error
        if sample.failure is not None:
            self._failed[handle] = sample.failure

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Start over after an error, with no sample live: samples are left half done, and a NaN in
        a page would reach the sample that is given the page next.
        """
        try:
            with out_of_memory_named(self._policy.backend.memory):
                yield
        except BaseException:
            self._live, self._streams, self._events, self._failed = {}, {}, [], {}
            self._executor.clear()
            self._allocator, self._scheduler = self._empty_cache()
            raise


def _default_runner(
    policy: SampledPolicy, size: CacheSize, max_sequences: int
) -> ModelRunner | PipelineRunner:
    """The runner that keeps the policy's device busy: on an asynchronous one the host stays a step
    behind."""
    if policy.backend.is_asynchronous:
        return GraphRunner(policy, size, max_sequences)
    return PolicyRunner(policy, size)
