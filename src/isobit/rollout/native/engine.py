"""The native engine: continuous batching over a paged KV cache, one forward a step over whatever is
there to do.

A step takes the scheduler's plan (decoding samples, chunks of prompts), puts its tokens through the
model, draws a token for every sample whose last token is now in the cache, and lets finished
samples go.  Either it waits for the tokens (``executor``), or it learns them while the device
computes the next step (``pipeline``): what runs the model says which.  New samples join as soon as
their prompt is there and leave their place when they end; nobody waits for a batch to finish.

What a sample's tokens and log-probabilities are does not depend on any of that: rows of a forward
do not see each other, noise is keyed by the sample, and K and V computed again have the bits they
had.  Chunking, sharing, preemption and the sizes in ``RolloutConfig`` change the time a call takes,
nothing else.

Where a trainer shares the GPU, cache and trainer take turns in its memory: ``release`` gives the
cache back until the next call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from isobit.config.schema import RolloutConfig
from isobit.memory.cache_size import (
    batched_tokens,
    choose_num_pages,
    out_of_memory_named,
    pages_for,
)
from isobit.models.function import LogProbFunction, function_of
from isobit.models.policy import Policy
from isobit.records.text import Completion
from isobit.rollout.native.executor import DirectExecutor
from isobit.rollout.native.pages import PageAllocator
from isobit.rollout.native.pipeline import PipelinedExecutor
from isobit.rollout.native.runner import ModelRunner, PipelineRunner, default_runner
from isobit.rollout.native.scheduler import Scheduler
from isobit.rollout.native.sequence import Sample, SharedPrompt
from isobit.rollout.progress import EngineStats, Progress
from isobit.rollout.request import Limits, Request, check_requests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Generates completions with the current weights of a policy.

    Args:
        policy: its rollout side is read; a publish between or during calls is noticed and all K and
            V are computed again.
        config: sizes of the batch and of the cache.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of the run; with prompt, visit and sample it fixes the noise.
        make_runner: what runs the model, from the policy and the number of pages; by default that
            goes by the policy's device.
    """

    def __init__(
        self,
        policy: Policy,
        config: RolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        make_runner: Callable[[Policy, int], ModelRunner | PipelineRunner] | None = None,
    ) -> None:
        num_pages = choose_num_pages(policy, config)
        self._policy = policy
        self.stats = EngineStats()
        self._config = config
        self._batched_tokens = batched_tokens(config, policy.backend.sizes)
        self._tokenizer = tokenizer
        self._seed = seed
        self._make_runner = partial(
            make_runner or partial(default_runner, max_sequences=config.max_sequences),
            policy,
            num_pages,
        )
        self._made: ModelRunner | PipelineRunner | None = None
        self._limits = Limits(
            policy.config.max_positions,
            policy.config.vocab_size,
            num_pages,
            self._runner().page_tokens,
            tokenizer is not None,
        )

    @property
    def function(self) -> LogProbFunction:
        """What the recorded log-probabilities are values of."""
        return function_of(self._policy, "rollout")

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with a RequestError and before anything runs, requests that can never be
        served.
        """
        check_requests(requests, self._limits)

    def release(self) -> None:
        """Give the memory of the KV cache and of the captured graphs back to the device; the
        weights stay.

        The next ``generate`` makes them again, at other addresses, with as many pages: its bits are
        those that it would have had.
        """
        if self._made is None:
            return
        self._made = None  # the graphs hold addresses of the cache, and go with it
        if (memory := self._policy.backend.memory) is not None:
            memory.release_cached()

    def generate(
        self, requests: Sequence[Request], progress: Callable[[Progress], None] | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in the order of the requests and of their samples.

        ``progress`` is called after every step.  If weights are published meanwhile, tokens drawn
        before keep their log-probabilities; each has the version of the weights it was drawn from.

        Raises:
            RequestError: before anything runs, if a request can never be served.
            NonFiniteError: if the model's output holds a NaN or an infinity.
            ConfigError: if the GPU has not the memory.
        """
        self.check(requests)
        self.stats = EngineStats()
        groups = self._make_samples(requests)
        samples = [sample for group in groups for sample in group]
        runner = self._runner()
        try:
            with out_of_memory_named():
                self._run(runner, samples, progress)
        except BaseException:
            # samples are left half done; and a NaN left in a page would poison whoever is given the
            # page next
            runner.clear()
            raise
        return [[sample.completion(self._tokenizer) for sample in group] for group in groups]

    def _runner(self) -> ModelRunner | PipelineRunner:
        """What runs the model, made now if it was given back or never made."""
        if self._made is None:
            with out_of_memory_named():
                self._made = self._make_runner()
        return self._made

    def _make_samples(self, requests: Sequence[Request]) -> list[list[Sample]]:
        lengths = [request.max_length(self._limits.context) for request in requests]
        max_pages = pages_for(max(lengths, default=0), self._limits.page_tokens)
        groups: list[list[Sample]] = []
        for request, length in zip(requests, lengths, strict=True):
            prompt = SharedPrompt(request, max_pages)
            groups.append(
                [
                    Sample(prompt, index, self._seed, length, max_pages, self._tokenizer)
                    for index in range(request.samples)
                ]
            )
        return groups

    def _run(
        self,
        runner: ModelRunner | PipelineRunner,
        samples: Sequence[Sample],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        started_at = perf_counter()
        allocator = PageAllocator(self._limits.num_pages, self._limits.page_tokens)
        executor = self._make_executor(runner)
        scheduler = Scheduler(
            samples,
            allocator,
            executor,
            self._config.max_sequences,
            self._batched_tokens,
            self.stats,
        )
        version = runner.version
        while not scheduler.is_done:
            if runner.version != version:
                version = runner.version
                scheduler.drop_all_pages()
                self.stats.weight_changes += 1
            executor.step(scheduler, version)
            self.stats.seconds = perf_counter() - started_at
            if progress is not None:
                running, tokens = len(scheduler.running), self.stats.generated_tokens
                progress(
                    Progress(
                        scheduler.num_finished, running, len(samples), tokens, self.stats.seconds
                    )
                )
        executor.settle()
        assert allocator.num_free == allocator.num_pages, "a finished batch holds no pages"

    def _make_executor(
        self, runner: ModelRunner | PipelineRunner
    ) -> DirectExecutor | PipelinedExecutor:
        if isinstance(runner, PipelineRunner):
            return PipelinedExecutor(runner, self.stats)
        return DirectExecutor(runner, self.stats)
