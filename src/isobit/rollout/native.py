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

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import (
    batched_tokens,
    choose_num_pages,
    out_of_memory_named,
)
from isobit.models.function import LogProbFunction, SampledPolicy, function_of
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
from isobit.rollout.executor import Works
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.runner import ModelRunner, PipelineRunner, PolicyRunner
from isobit.rollout.sequence import GrowingText, Sample, SharedPrompt
from isobit.util.errors import DataError, IsobitError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self._failed: dict[Handle, IsobitError] = {}
        """The samples that have failed alone since the last step."""
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
                works = self._open()
                works.step()
                self._collect(works)
            self.stats.seconds = perf_counter() - self._started_at
        if self._failed:
            failed, self._failed = self._failed, {}
            first = next(iter(failed.values()))
            first.samples = failed
            raise first
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
        for handle in asked:
            self._failed.pop(handle, None)
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
        for handle, stream in list(self._streams.items()):
            try:
                event = stream.event()
            except DataError as error:
                sample = self._live[handle]
                sample.fail(error)
                works.remove([sample])
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
        """After an error nobody is live: samples are left half done, and a NaN left in a page would
        poison whoever is given the page next.
        """
        try:
            with out_of_memory_named(self._policy.backend.memory):
                yield
        except BaseException:
            self._live, self._streams, self._events, self._failed = {}, {}, [], {}
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


class SampleStream:
    """Follows one sample; with a tokenizer its text, too."""

    def __init__(self, sample: Sample, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._sample = sample
        self._told = 0  # tokens
        sampling = sample.prompt.request.sampling
        self._text = (
            None
            if tokenizer is None
            else GrowingAnswer(tokenizer, sampling.stop_strings, sampling.special_tokens)
        )

    def event(self, completion: Completion | None = None) -> SampleEvent | None:
        """What is new, or None; ``completion`` once the sample has ended."""
        sample, told = self._sample, self._told
        if completion is None and len(sample.log_probs) == told:
            return None
        token_ids = tuple(sample.tokens[len(sample.prompt.tokens) + told :])
        self._told = len(sample.log_probs)
        text = ""
        if self._text is not None:
            text = self._text.rest(completion.text) if completion else self._text.feed(token_ids)
        truncates = sample.prompt.request.sampling.truncates
        truncated = sample.truncated_log_probs[told:] if truncates else ()
        log_probs, routings = tuple(sample.log_probs[told:]), tuple(sample.routings[told:])
        columns = log_probs, tuple(truncated), routings
        return SampleEvent(sample.handle, token_ids, *columns, text, completion)


class GrowingAnswer:
    """The text of a sample as far as it is sure."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_strings: Sequence[str],
        special: bool = False,
    ) -> None:
        self._text = GrowingText(tokenizer, special)
        self._stop_strings = stop_strings
        self._held = ""
        self._told = 0  # characters

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, none of which ended the sample; the text that is sure now."""
        for token_id in token_ids:
            new, complete = self._text.feed(token_id)
            if complete:
                self._held += new
        sure = len(self._held) - self._possible_stop()
        told, self._held = self._held[:sure], self._held[sure:]
        self._told += len(told)
        return told

    def rest(self, text: str) -> str:
        """What of the final ``text`` has not been told."""
        return text[self._told :]

    def _possible_stop(self) -> int:
        """The longest end of the held text with which a stop string begins, in characters."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self._held)) + 1)
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
