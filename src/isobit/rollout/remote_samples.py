"""Samples that another program draws (``isobit.rollout.vllm_engine``,
``isobit.rollout.http_engine``): which are live, what was drawn, and the events of it.

Stop strings, episodes and half-done samples are those of the native engine, since a sample is the
same object as there (``isobit.rollout.sequence``).  A log-probability that is not finite ends all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from isobit.records.text import Completion
from isobit.rollout.engine import Follow, SampleEvent, parted
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.requests import EngineLimits, Handle, Request, check_limits, requests_of
from isobit.rollout.sequence import Sample, SharedPrompt
from isobit.util.errors import NonFiniteError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RemoteSamples:
    """The samples of an engine whose tokens another program draws: most of a ``RolloutEngine``.  An
    engine defines how samples are drawn there (``_draw``) and ended there (``_let_go``).
    """

    sharing = None

    def __init__(
        self, limits: EngineLimits, seed: int, tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        self._limits, self._seed, self._tokenizer = limits, seed, tokenizer
        self.stats, self._started_at = EngineStats(), perf_counter()
        self._live: dict[Handle, Sample] = {}
        """In the order of arrival."""
        self._events: list[SampleEvent] = []
        self._update_s = 0.0  # of updates since the last sample ended
        self._notes: list[str] = []

    def _draw(self) -> None:
        """Have live samples drawn on, and take in what was drawn."""
        raise NotImplementedError

    def _let_go(self, samples: Iterable[Sample]) -> None:
        """Have samples drawn no further, where they are."""
        raise NotImplementedError

    def _take_on(self, sample: Sample) -> None:
        self._live[sample.handle] = sample

    def _check(self, requests: Sequence[Request], live: Iterable[Handle] = ()) -> None:
        """Refuse what can never be served."""
        check_limits(requests, self._limits, list(live))

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return len(self._live)

    def notes(self) -> list[str]:
        """Lines about weights and servers since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what can never be served, and what is live already."""
        self._check(requests, self._live)

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on requests, whose samples are followed to their end alone."""
        self.check(requests)
        if follow != "end":
            raise RequestError("samples that others draw are followed to their end alone")
        self._begin_period()
        groups: list[list[Sample]] = []
        for request in requests:
            prompt = SharedPrompt(request, max_pages=0)
            groups.append([self._make(prompt, index) for index in range(request.samples)])
        for sample in (sample for group in groups for sample in group):
            self._take_on(sample)
        return [[sample.handle for sample in group] for group in groups]

    def step(self) -> list[SampleEvent]:
        """Have tokens drawn, and return what has ended. Raises NonFiniteError for a log-probability
        that is not finite.
        """
        if self._live:
            with self._all_or_nothing():
                self._draw()
            self.stats.seconds = perf_counter() - self._started_at
        events, self._events = self._events, []
        return events

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with the tokens that were heard of."""
        asked = set(handles)
        for sample in self._leaving(asked):
            self._end(sample)
        events_of_asked, self._events = parted(self._events, asked)
        return events_of_asked

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn, as far as they were heard of."""
        return len(self._live[handle].log_probs)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let samples go as they are."""
        half_done: dict[Handle, Completion] = {}
        for sample in self._leaving(set(handles)):
            half_done[sample.handle] = sample.completion(tokenizer=None)
            del self._live[sample.handle]
        _, self._events = parted(self._events, half_done)
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples.  Raises RequestError as the protocol says."""
        asked = requests_of(half_done, requests, self._live)
        self._check(list(asked.values()))
        self._begin_period()
        prompts = {name: SharedPrompt(one, max_pages=0) for name, one in asked.items()}
        samples = list[Sample]()
        for handle, completion in half_done.items():
            sample = self._make(prompts[handle.prompt_id, handle.visit], handle.sample)
            sample.take_up(completion)
            samples.append(sample)
        for sample in samples:
            self._take_on(sample)

    def _make(self, prompt: SharedPrompt, index: int) -> Sample:
        length = prompt.request.max_length(self._limits.context)
        return Sample(prompt, index, self._seed, length, 0, self._tokenizer)

    def _leaving(self, asked: Iterable[Handle]) -> list[Sample]:
        """Live samples, which are drawn no further."""
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        for sample in leaving:
            sample.finish_reason = "aborted"
        self._let_go(leaving)
        return leaving

    def _append(
        self, sample: Sample, token: int, log_prob: float, version: int, whose: str
    ) -> None:
        """Note a token that was drawn for a sample.  Raises NonFiniteError."""
        if not -1e30 < log_prob <= 1e-3:
            raise NonFiniteError(
                f"{whose} gave the log-probability {log_prob} for token {token} of prompt "
                f"{sample.handle.prompt_id!r}: its logits are not finite"
            )
        sample.accept(token, log_prob, version)
        self.stats.generated_tokens += 1

    def _end(self, sample: Sample) -> None:
        self._let_go([sample])
        del self._live[sample.handle]
        completion = sample.completion(self._tokenizer)
        self._events.append(SampleEvent(sample.handle, completion=completion))

    def _begin_period(self) -> None:
        if not self._live:
            self.stats, self._started_at = EngineStats(update_s=self._update_s), perf_counter()
            self._update_s = 0.0

    def _count_update(self, seconds: float, is_first: bool) -> None:
        """Note that new weights have arrived there."""
        if self._live:
            self.stats.update_s += seconds
            self.stats.weight_changes += not is_first
        else:
            self._update_s += seconds

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Start over after an error, with no sample live."""
        try:
            yield
        except BaseException:
            self._let_go(list(self._live.values()))
            self._live, self._events = {}, []
            raise
