"""The native engine: continuous batching over a paged KV cache, one forward a step over whatever is
there to do (a ``RolloutEngine``).

A step takes the scheduler's plan (decoding samples, chunks of prompts), puts its tokens through the
model, draws a token for every sample whose last token is now in the cache, and lets finished
samples go.  Either it waits for the tokens (``executor``), or it learns them while the device
computes the next step (``pipeline``): what runs the model says which.  New samples join as soon as
their prompt is there and leave their place when they end; nobody waits for a batch to finish.

What a sample's tokens and log-probabilities are does not depend on any of that: rows of a forward
do not see each other, noise is keyed by the sample, and K and V computed again have the bits they
had.  Chunking, sharing, preemption, what else was asked for and the sizes in ``RolloutConfig``
change the time a sample takes, nothing else.

Weights are read where the policy publishes them, so a publication needs no word: each step compares
the version with that of the pages, and recomputes those if they differ.

Everything that can be known to fail is refused before it is taken on, with the numbers: every
sequence of an accepted request can run to its full length alone in the cache, which is why the
scheduler never gets stuck.  A runner, its cache and their books can be given back and made again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isobit.config.tables import RolloutConfig
from isobit.memory.cache_size import (
    PageAllocator,
    batched_tokens,
    choose_num_pages,
    out_of_memory_named,
)
from isobit.models.policy_share import LogProbFunction, SampledPolicy, function_of
from isobit.records.text import Completion
from isobit.rollout.engine import (
    EngineStats,
    Follow,
    Handle,
    Limits,
    Request,
    SampleEvent,
    check_calibrated,
    check_limits,
    parted,
    requests_of,
)
from isobit.rollout.executor import DirectExecutor, PipelinedExecutor
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.runner import ModelRunner, PipelineRunner, PolicyRunner
from isobit.rollout.scheduler import Scheduler
from isobit.rollout.sequence import Sample, SampleStream, SharedPrompt
from isobit.util.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


class NativeEngine:
    """Draws samples from the current weights of a policy.

    Args:
        policy: its rollout side is read.
        config: sizes of the batch and of the cache.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of the run; with prompt, visit and sample it fixes the noise.
        make_runner: what runs the model, from the policy and the number of pages; by default that
            goes by the policy's device.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        config: RolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        make_runner: Callable[[SampledPolicy, int], ModelRunner | PipelineRunner] | None = None,
    ) -> None:
        num_pages = choose_num_pages(policy, config)
        self.stats = EngineStats()
        self._started_at = perf_counter()
        self._policy = policy
        self.max_sequences = config.max_sequences
        self._batched_tokens = batched_tokens(config, policy.backend.sizes)
        self._tokenizer = tokenizer
        self._seed = seed
        self._make_runner = partial(
            make_runner or partial(_default_runner, max_sequences=config.max_sequences),
            policy,
            num_pages,
        )
        self._live: dict[Handle, Sample] = {}
        """In the order of arrival."""
        self._streams: dict[Handle, SampleStream] = {}
        self._events: list[SampleEvent] = []
        """What the next step has to tell."""
        with out_of_memory_named(self._policy.backend.memory):
            runner = self._make_runner()
        self._limits = Limits(
            policy.config.max_positions,
            policy.config.vocab_size,
            num_pages,
            runner.page_tokens,
            tokenizer is not None,
        )
        self._works: Works | None = self._assemble(runner)

    @property
    def function(self) -> LogProbFunction:
        """What the recorded log-probabilities are values of."""
        return function_of(self._policy, "rollout")

    @property
    def limits(self) -> Limits:
        """What the model and the cache can take."""
        return self._limits

    @property
    def free_pages(self) -> int:
        """Pages of the cache that nobody holds: all, where it has been given back."""
        return works.free_pages if (works := self._works) else self._limits.num_pages

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Samples that hold a place; the other live ones wait in line."""
        return 0 if self._works is None else self._works.num_running

    @property
    def has_room(self) -> bool:
        """Whether a further sample would soon have a place and pages; of an engine that has given
        them back, whether nobody waits for them.
        """
        return not self._live if self._works is None else self._works.has_room

    def figures(self) -> dict[str, Any]:
        """The pages of the cache and their tokens."""
        limits = self._limits
        return {"kv_pages": limits.num_pages, "page_tokens": limits.page_tokens}

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
            RequestError: as ``check`` and ``check_calibrated`` do, and where text is to be followed
                without a tokenizer; then none of them is taken on.
        """
        self.check(requests)
        check_calibrated(self._policy.weights("rollout").kv_scales)
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
        if self._works is not None:
            self._works.add(samples)
        return [[sample.handle for sample in group] for group in groups]

    def step(self) -> list[SampleEvent]:
        """Put one forward through the model and draw a token for each sample that is up to date.

        After an error no sample is live, and the engine can be asked again.

        Raises:
            NonFiniteError: if the model's output holds a NaN or an infinity.
            OutOfMemoryError: if the device has not the memory.
        """
        if self._live:
            with self._all_or_nothing():
                works = self._open()
                works.step()
                self._collect(works)
            self.stats.seconds = perf_counter() - self._started_at
        events, self._events = self._events, []
        return events

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with the tokens so far; one that is in flight is dropped.

        Of what has ended already and been told of, the pages are no longer parked.
        """
        asked = set(handles)
        with self._all_or_nothing():
            leaving = [sample for handle, sample in self._live.items() if handle in asked]
            for sample in leaving:
                sample.finish_reason = "aborted"
            if self._works is not None and leaving:
                self._works.remove(leaving)
            if self._works is not None:
                self._works.drop_parked(asked)
            for sample in leaving:
                self._end(sample)
        told, self._events = parted(self._events, asked)
        return told

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
            if self._works is not None and leaving:
                self._works.remove(leaving)
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """As the protocol says.  They share the pages of their prompt with those who wait for it.

        Raises RequestError as it says; then none of them is taken on.
        """
        asked = requests_of(half_done, requests, self._live)
        check_limits(list(asked.values()), self._limits)
        self._check_adapters(asked.values())
        if not self._live:
            self._begin_period()
        prompts = self._prompts_in_line()
        made: list[Sample] = []
        for handle, completion in half_done.items():
            name = handle.prompt_id, handle.visit
            own = SharedPrompt(asked[name], self._limits.max_pages)
            prompt = prompts.setdefault(name, own)
            if (prompt.tokens, prompt.adapter) != (own.tokens, own.adapter):
                prompt = own  # an environment has opened it
            sample = self._make_sample(prompt, handle.sample)
            sample.take_up(completion)
            made.append(sample)
        self._live.update((sample.handle, sample) for sample in made)
        if self._works is not None:
            self._works.add(made)

    def take_weights(self) -> None:
        """Look now for a publication, which the next step would notice by itself."""
        if self._works is not None:
            with self._all_or_nothing():
                self._works.notice_weights()
                self._collect(self._works)

    def release(self) -> None:
        """Give the memory of the KV cache and of the captured graphs back to the device until the
        next step; the weights stay.

        They are made again at other addresses, with as many pages.  Live samples wait, and compute
        their K and V again.
        """
        if self._works is None:
            return
        with self._all_or_nothing():
            self._works.drop_all_pages()
            self._collect(self._works)
            self._works.remove(list(self._live.values()))
        self._works = None  # the graphs hold addresses of the cache, and go with it
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
        """Those that samples wait for, by prompt and visit.  A sample that comes later than those
        who run already brings its prompt again: they have their places in the line, were they to
        lose their pages, and it has another.
        """
        prompts = (sample.prompt for sample in self._live.values())
        return {
            (prompt.request.prompt.id, prompt.request.visit): prompt
            for prompt in prompts
            if prompt.waiting or self._works is None
        }

    def _open(self) -> Works:
        """What runs the model; made now, with all live samples in line, if it was given back."""
        if self._works is None:
            self._works = self._assemble(self._make_runner())
            self._works.add(self._live.values())
        return self._works

    def _assemble(self, runner: ModelRunner | PipelineRunner) -> Works:
        num_pages = self._limits.num_pages
        return Works(runner, num_pages, self.max_sequences, self._batched_tokens, self.stats)

    def _begin_period(self) -> None:
        self.stats, self._started_at = EngineStats(), perf_counter()
        if self._works is not None:
            self._works.count_into(self.stats)

    def _collect(self, works: Works) -> None:
        """Note what happened to the samples."""
        for sample in works.take_finished():
            self._end(sample)
        self._events += [
            event for stream in self._streams.values() if (event := stream.event()) is not None
        ]

    def _end(self, sample: Sample) -> None:
        del self._live[sample.handle]
        completion = sample.completion(self._tokenizer)
        stream = self._streams.pop(sample.handle, None)
        event = stream.event(completion) if stream is not None else None
        self._events.append(event or SampleEvent(sample.handle, completion=completion))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an error nobody is live: samples are left half done, and a NaN left in a page would
        poison whoever is given the page next.
        """
        try:
            with out_of_memory_named(self._policy.backend.memory):
                yield
        except BaseException:
            self._live, self._streams, self._events = {}, {}, []
            works, self._works = self._works, None
            if works is not None:
                works.runner.clear()
                self._works = self._assemble(works.runner)
            raise


def _default_runner(
    policy: SampledPolicy, num_pages: int, max_sequences: int
) -> ModelRunner | PipelineRunner:
    """What keeps the policy's device busy: the host a step behind an asynchronous one."""
    if policy.backend.is_asynchronous:
        return GraphRunner(policy, num_pages, max_sequences)
    return PolicyRunner(policy, num_pages)
