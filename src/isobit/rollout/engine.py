"""The native engine: continuous batching over a paged KV cache, one forward a step over whatever is there to do.

A step takes the scheduler's plan (decoding samples, chunks of prompts), puts its tokens through the model, draws a token for every
sample whose last known token is now in the cache, and lets finished samples go.  New samples join as soon as their prompt is there
and leave their place when they end; nobody waits for a batch to finish.

What a sample's tokens and log-probabilities are does not depend on any of that: rows of a forward do not see each other, noise is
keyed by the sample, and K and V computed again have the bits they had.  Chunking, sharing, preemption and the sizes in
``RolloutConfig`` change the time a call takes, nothing else.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobit.config.schema import RolloutConfig
from isobit.errors import NonFiniteError
from isobit.models.policy import Policy
from isobit.records import Completion
from isobit.rollout.batch import build_batch
from isobit.rollout.pages import PageAllocator, pages_for
from isobit.rollout.progress import EngineStats, Progress
from isobit.rollout.request import Limits, Request, check_requests
from isobit.rollout.runner import ModelRunner, PolicyRunner, choose_num_pages
from isobit.rollout.sampler import sample_tokens
from isobit.rollout.scheduler import Plan, Scheduler
from isobit.rollout.sequence import Sample, SharedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Generates completions with the current weights of a policy.

    Args:
        policy: its rollout side is read; a publish between or during calls is noticed and all K and V are computed again.
        config: sizes of the batch and of the cache.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of the run; with prompt, visit and sample it fixes the noise.
        make_runner: what runs the model, from the policy and the number of pages.
    """

    def __init__(
        self,
        policy: Policy,
        config: RolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        make_runner: Callable[[Policy, int], ModelRunner] = PolicyRunner,
    ) -> None:
        num_pages = choose_num_pages(policy, config)
        self.stats = EngineStats()
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._limits = Limits(policy.config.max_positions, policy.config.vocab_size, num_pages, tokenizer is not None)
        self._runner = make_runner(policy, num_pages)

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with a RequestError and before anything runs, requests that can never be served."""
        check_requests(requests, self._limits)

    def generate(self, requests: Sequence[Request], progress: Callable[[Progress], None] | None = None) -> list[list[Completion]]:
        """The completions of each request, in the order of the requests and of their samples.

        ``progress`` is called after every step.  If weights are published meanwhile, tokens drawn before keep their
        log-probabilities, and ``weights_version`` is the one that the first token was drawn from.

        Raises:
            RequestError: before anything runs, if a request can never be served.
            NonFiniteError: if the model's output holds a NaN or an infinity.
        """
        self.check(requests)
        self.stats = EngineStats()
        groups = self._make_samples(requests)
        samples = [sample for group in groups for sample in group]
        try:
            self._run(samples, progress)
        except NonFiniteError:
            self._runner.clear()  # a NaN left in a page would poison whoever is given the page next
            raise
        return [[sample.completion(self._tokenizer) for sample in group] for group in groups]

    def _make_samples(self, requests: Sequence[Request]) -> list[list[Sample]]:
        lengths = [request.max_length(self._limits.context) for request in requests]
        max_pages = pages_for(max(lengths, default=0))
        groups: list[list[Sample]] = []
        for request, length in zip(requests, lengths, strict=True):
            prompt = SharedPrompt(request, max_pages)
            groups.append([Sample(prompt, index, self._seed, length, max_pages, self._tokenizer) for index in range(request.samples)])
        return groups

    def _run(self, samples: Sequence[Sample], progress: Callable[[Progress], None] | None) -> None:
        started_at = perf_counter()
        allocator = PageAllocator(self._limits.num_pages)
        sizes = self._config.max_sequences, self._config.max_batched_tokens
        scheduler = Scheduler(samples, allocator, self._runner.copy_page, *sizes, self.stats)
        version = self._runner.version
        finished = 0
        while not scheduler.is_done:
            if self._runner.version != version:
                version = self._runner.version
                scheduler.drop_all_pages()
                self.stats.weight_changes += 1
            finished += self._step(scheduler, version)
            self.stats.seconds = perf_counter() - started_at
            if progress is not None:
                progress(Progress(finished, len(scheduler.running), len(samples), self.stats.generated_tokens, self.stats.seconds))
        assert allocator.num_free == allocator.num_pages, "a finished batch holds no pages"

    def _step(self, scheduler: Scheduler, version: int) -> int:
        """One forward, and one token for every sample that is up to date then; how many samples finished."""
        plan = scheduler.plan()
        decoded: list[tuple[Sample, Tensor]] = []
        if plan:
            hidden = self._runner.forward(build_batch(plan))
            if self._runner.version != version:
                return 0  # published during the forward: its result belongs to no version of the weights
            scheduler.advance(plan)
            decoded = _settle(plan, hidden)
        fresh = scheduler.start()
        assert plan or scheduler.running, "an engine with work to do always finds some"
        self._draw([*decoded, *fresh], version)
        return len(scheduler.remove_finished())

    def _draw(self, ready: Sequence[tuple[Sample, Tensor]], version: int) -> None:
        """The next token of each sample, from its final hidden state."""
        if not ready:
            return
        distinct: list[Tensor] = []
        rows: list[int] = []
        for _, hidden in ready:  # the samples of a prompt stand side by side and share one hidden state
            if not distinct or hidden is not distinct[-1]:
                distinct.append(hidden)
            rows.append(len(distinct) - 1)
        samples = [sample for sample, _ in ready]
        drawn = sample_tokens(self._runner.logits(torch.stack(distinct)), rows, samples)
        for sample, token_id, logprob in zip(samples, drawn.token_ids, drawn.logprobs, strict=True):
            sample.accept(token_id, logprob, version)
        if drawn.truncated_logprobs is not None:
            for sample, logprob in zip(samples, drawn.truncated_logprobs, strict=True):
                sample.truncated_logprobs.append(logprob)
        self.stats.generated_tokens += len(samples)


def _settle(plan: Plan, hidden: Tensor) -> list[tuple[Sample, Tensor]]:
    """Give finished prompts their last hidden state; returns the samples that are up to date, each with its own."""
    up_to_date: list[tuple[Sample, Tensor]] = []
    row = -1
    for sequence, count in plan:
        row += count
        if sequence.remaining > 0:
            continue
        if isinstance(sequence, SharedPrompt):
            sequence.last_hidden = hidden[row].clone()  # a view would keep the whole forward alive
        elif isinstance(sequence, Sample):
            up_to_date.append((sequence, hidden[row]))
    return up_to_date
