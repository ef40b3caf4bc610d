"""What an engine is to those who generate with it, whatever program it is.

Requests come and go while others run; ``step`` is the only thing that takes long.

    submit -> handles      the samples wait in line
    step   -> events       some tokens are drawn; the samples that ended, and increments of those
                           that are followed
    abort  -> events       samples end where they stand
    withdraw               half-done samples leave, to go on elsewhere
    admit                  half-done samples of another engine go on here
    take_weights           what is drawn from now on is drawn from the weights published last
    release                the device has its memory back until the next step

``generate`` is the loop for those who want completions and nothing else.  What an engine did, how
far a ``generate`` call has come and what an engine is asked for are plain records.

A half-done sample moves between engines as a completion that was aborted, without its K and V.  The
engine that takes it computes them again, as after a preemption, and draws on at the next position:
the sample's noise is keyed by its name and its place, so the tokens are those that the first engine
would have drawn.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any, Literal, Protocol

from isobit.kernels.noise import sample_key
from isobit.memory.cache_size import pages_for
from isobit.models.function import LogProbFunction
from isobit.precision.kv_scales import KvScales
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.util.errors import RequestError


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine last had nothing to do: those of one ``generate`` call."""

    generated_tokens: int = 0
    """Those of samples that were aborted as well."""
    prompt_tokens: int = 0
    """Prompt tokens put through the model: each prompt once, and again if its pages were given
    up.
    """
    recomputed_tokens: int = 0
    """Generated tokens whose K and V were given up and computed again."""
    kept_tokens: int = 0
    """Tokens of earlier turns whose K and V were still there when their sample came back."""
    preemptions: int = 0
    """Running samples that lost their pages to an earlier one."""
    weight_changes: int = 0
    """Times that new weights were published and all pages dropped."""
    shared_pages: int = 0
    """Pages that a sample took over from its prompt instead of computing them."""
    copied_pages: int = 0
    """Shared partial pages that were copied before the first write into them."""
    chunks: int = 0
    """Pieces of prompts, or of recomputations, that the token budget of a forward cut off before
    the end.
    """
    forwards: int = 0
    seconds: float = 0.0
    update_s: float = 0.0
    """Of these, in which new weights were on their way to an engine with weights of its own."""
    kv_ratio: float = 0.0
    """The largest magnitude of Q, K and V over the largest that its scale holds; 0 with scales a
    token.
    """

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Of two calls together."""
        names = [field.name for field in fields(self) if field.name != "kv_ratio"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return EngineStats(**sums, kv_ratio=max(self.kv_ratio, other.kv_ratio))


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a ``generate`` call."""

    finished: int
    running: int
    total: int
    """Samples."""
    generated_tokens: int
    seconds: float
    """Since the start of the call."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time since the start."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


def check_calibrated(scales: KvScales | None) -> None:
    """Raises RequestError where a flow has scales of Q, K and V a tensor and none are set yet."""
    if scales is not None and not scales.is_set:
        raise RequestError(
            'precision.kv_scales is "per_tensor", and no scale is set yet: call '
            "isobit.calibrate_kv_scales(policy, prompts, tokens_per_batch) first"
        )


SMALLEST_TEMPERATURE = 1e-6
"""Above 0: logits divided by less leave FP32."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One sample: ``sample`` counts those of one visit of one prompt.

    The name says which noise is drawn, so no two samples of one name are live at a time.
    """

    prompt_id: str
    visit: int
    sample: int


@dataclass(frozen=True, slots=True)
class Request:
    """``samples`` completions of one prompt.  ``visit`` counts how often a run has come back to the
    prompt: it keys the noise.
    """

    prompt: Prompt
    visit: int
    samples: int
    sampling: SamplingParams
    seed: int | None = None
    """Keys the noise in place of the run's seed, the prompt and the visit: who asks again with the
    same seed gets the same tokens, whatever the prompt is called and whatever else is live.
    """
    keys: tuple[int, ...] | None = None
    """The key of each sample's noise, in place of all that: who asks knows more of them."""
    comes_back: bool = False
    """A sample that has stopped may be admitted again, with more tokens behind its own: until it is
    aborted, its K and V stay while their memory is not needed."""
    adapter: str | None = None
    """One of ``Policy.adapters``; None for the policy as it is."""

    def noise_key(self, run_seed: int, sample: int) -> int:
        """The key of the noise of one sample, a signed 64-bit integer."""
        if self.keys is not None:
            return self.keys[sample]
        if self.seed is not None:
            return sample_key(self.seed, "", 0, sample)
        return sample_key(run_seed, self.prompt.id, self.visit, sample)

    def max_length(self, context: int) -> int:
        """Tokens of the prompt and its longest possible completion within the model's context."""
        return min(len(self.prompt.token_ids) + self.sampling.max_new_tokens, context)


def check_requests(requests: Sequence[Request], live: Collection[Handle] = ()) -> None:
    """Refuse requests that contradict themselves, one another, or the ``live`` samples.

    Raises:
        RequestError: naming the prompt, and what is asked for.
    """
    seen = {(handle.prompt_id, handle.visit) for handle in live}
    for request in requests:
        name = (request.prompt.id, request.visit)
        if name in seen:
            raise RequestError(
                f"prompt {request.prompt.id!r} is requested twice for visit {request.visit}: both "
                "would draw the same samples; "
                "ask once with more samples, or count the visits"
            )
        seen.add(name)
        _check_sampling(request)


def requests_of(
    samples: Collection[Handle], requests: Iterable[Request], live: Collection[Handle]
) -> dict[tuple[str, int], Request]:
    """Those of the requests that the samples belong to, by prompt and visit.

    Raises:
        RequestError: where a sample is among the ``live`` ones.
    """
    for handle in samples:
        if handle in live:
            raise RequestError(
                f"sample {handle.sample} of prompt {handle.prompt_id!r}, visit {handle.visit}, is "
                "here already: taken on twice it would be drawn twice; withdraw it first"
            )
    by_name = {(one.prompt.id, one.visit): one for one in requests}
    names = dict.fromkeys((one.prompt_id, one.visit) for one in samples)
    return {name: by_name[name] for name in names}


def _check_sampling(request: Request) -> None:
    sampling = request.sampling
    wrong = {
        f"samples = {request.samples} must be at least 1": request.samples < 1,
        f"max_new_tokens = {sampling.max_new_tokens} must be at least 1": sampling.max_new_tokens
        < 1,
        f"temperature = {sampling.temperature} must be finite and not below 0": not 0
        <= sampling.temperature
        < math.inf,
        f"temperature = {sampling.temperature} is too small to divide by in FP32: 0 is greedy, "
        f"else at least {SMALLEST_TEMPERATURE:g}": 0 < sampling.temperature < SMALLEST_TEMPERATURE,
        f"top_k = {sampling.top_k} must not be below 0": sampling.top_k < 0,
        f"top_p = {sampling.top_p} must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
        f"min_p = {sampling.min_p} must be at least 0 and below 1": not 0 <= sampling.min_p < 1,
        "an empty stop string would stop everything": "" in sampling.stop_strings,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise RequestError(f"prompt {request.prompt.id!r}: {message}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the cache can take: positions, vocabulary entries, pages and their tokens;
    and whether text can be decoded.
    """

    context: int
    vocab_size: int
    num_pages: int
    page_tokens: int
    has_tokenizer: bool

    @property
    def max_pages(self) -> int:
        """The most pages that one sequence can hold."""
        return min(pages_for(self.context, self.page_tokens), self.num_pages)


def check_limits(
    requests: Sequence[Request], limits: Limits, live: Collection[Handle] = ()
) -> None:
    """Refuse the batch if ``check_requests`` does, or if any request of it can never be served.

    Raises:
        RequestError: naming the prompt, what it asks for and what there is.
    """
    check_requests(requests, live)
    for request in requests:
        _check_prompt(request, limits)
        if request.sampling.stop_strings and not limits.has_tokenizer:
            raise RequestError(
                f"prompt {request.prompt.id!r} asks for stop strings, which need a tokenizer; this "
                "engine has none"
            )


def _check_prompt(request: Request, limits: Limits) -> None:
    prompt = request.prompt
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise RequestError(f"prompt {prompt.id!r} has no tokens: there is nothing to continue")
    if num_tokens >= limits.context:
        raise RequestError(
            f"prompt {prompt.id!r} has {num_tokens} tokens; the model's context holds "
            f"{limits.context}, and a new token must fit: "
            "shorten or drop the prompt"
        )
    if not (min(prompt.token_ids) >= 0 and max(prompt.token_ids) < limits.vocab_size):
        raise RequestError(
            f"prompt {prompt.id!r} holds token ids from {min(prompt.token_ids)} to "
            f"{max(prompt.token_ids)}; the model knows 0 to "
            f"{limits.vocab_size - 1}: the tokenizer belongs to another model"
        )
    max_length = request.max_length(limits.context)
    # the last token of all is sampled, but never read back
    needed = pages_for(max_length - 1, limits.page_tokens)
    if needed > limits.num_pages:
        raise RequestError(
            f"prompt {prompt.id!r} can grow to {max_length} tokens ({num_tokens} of the prompt, at "
            f"most {request.sampling.max_new_tokens} "
            f"new, context {limits.context}): {needed} pages of {limits.page_tokens} tokens, and "
            f"the KV cache has {limits.num_pages}; "
            "raise rollout.kv_pages or rollout.kv_memory_gib, or lower rollout.max_new_tokens"
        )


Follow = Literal["end", "tokens", "text"]
"""What is told of a sample: its end alone; its tokens as they are drawn; their text as well, which
takes the time of decoding twice.
"""


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """Something that happened to a sample.

    What is told of a followed sample's tokens, log-probabilities and text adds up to those of its
    completion; for one that is not followed they are empty.
    """

    handle: Handle
    token_ids: tuple[int, ...] = ()
    """Drawn since the sample's last event."""
    log_probs: tuple[float, ...] = ()
    truncated_log_probs: tuple[float, ...] = ()
    routings: tuple[int, ...] = ()
    text: str = ""
    completion: Completion | None = None
    """Set when the sample has ended: there is no later event of it."""


def parted(
    events: Iterable[SampleEvent], handles: Collection[Handle]
) -> tuple[list[SampleEvent], list[SampleEvent]]:
    """The events of these samples, and those of all others, each in their order."""
    told: list[SampleEvent] = []
    others: list[SampleEvent] = []
    for event in events:
        (told if event.handle in handles else others).append(event)
    return told, others


class Sampler(Protocol):
    """What gives samples when it is asked for them: an engine, or episodes around one."""

    @property
    def stats(self) -> EngineStats:
        """What was done since the engine last had no live sample; a new record each time."""
        ...

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        ...

    @property
    def num_running(self) -> int:
        """Samples that take part in the steps; the other live ones wait in line."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a further sample would soon have a place and memory, beside those that wait."""
        ...

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with a RequestError that names prompt and numbers, what can never be served, and
        what is live already.
        """
        ...

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on requests; a handle for each sample, in their order.

        Raises:
            RequestError: as ``check`` does; then none of them is taken on.
        """
        ...

    def step(self) -> list[SampleEvent]:
        """Draw tokens for some of the live samples; nothing happens without any.

        An error may belong to samples alone: it names them (``IsobitError.samples``), they have
        ended, all others are live, and what else has happened is told by the next step.  After any
        other error no sample is live, and the engine can be asked again.

        Raises:
            NonFiniteError: if the model's output holds a NaN or an infinity.
            OutOfMemoryError: if the device has not the memory.
        """
        ...

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with finish reason "aborted" and the tokens so far; what
        they held is free.

        Handles of samples that have ended, and been told of, are passed over; they do not come
        back (``Request.comes_back``).
        """
        ...

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn."""
        ...

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let live samples go half done, in their order of arrival: as ``abort`` would end them,
        without text.  Nothing more is told of them, and what they held is free.

        Handles of samples that have ended are passed over.
        """
        ...

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples that an engine with the same weights and the same seed has let
        go; ``requests`` are theirs, and may be others too.  They are followed to their end alone,
        and draw what they would have drawn there.

        Raises:
            RequestError: where one is live already, and for what can never be served here; then
                none of them is taken on.
        """
        ...

    def take_weights(self) -> None:
        """Go on with the weights that were published last.

        Tokens drawn before keep their log-probabilities and versions; the K and V of live samples
        are computed again.
        """
        ...


class RolloutEngine(Sampler, Protocol):
    """Draws samples from a policy."""

    @property
    def function(self) -> LogProbFunction:
        """What the recorded log-probabilities are values of."""
        ...

    def figures(self) -> dict[str, Any]:
        """Its sizes, for a run's manifest."""
        ...

    def notes(self) -> list[str]:
        """Lines for a run's console on what happened since the last call."""
        ...

    def release(self) -> None:
        """Give all memory but that of the weights back to the device until the next step.

        Live samples stay, and draw what they would have drawn.
        """
        ...


def generate(
    engine: Sampler,
    requests: Sequence[Request],
    progress: Callable[[Progress], None] | None = None,
    complete: Callable[[int, list[Completion]], None] | None = None,
) -> list[list[Completion]]:
    """The completions of each request, in the order of the requests and of their samples.

    The engine must have nothing else to do.  ``progress`` is called after every step, ``complete``
    with the place of a request and its completions once it has all of them; an error that one
    raises aborts all samples and passes through.

    Raises:
        RequestError: where a sample is live; and what ``Sampler.submit`` and ``step`` raise.
    """
    check_is_free(engine)
    engine.take_weights()
    handles = engine.submit(requests)
    total = sum(map(len, handles))
    found: dict[Handle, Completion] = {}
    group_of = {handle: place for place, group in enumerate(handles) for handle in group}
    missing = [len(group) for group in handles]
    try:
        while len(found) < total:
            for event in engine.step():
                if event.completion is not None:
                    found[event.handle] = event.completion
                    place = group_of[event.handle]
                    missing[place] -= 1
                    if complete is not None and not missing[place]:
                        complete(place, [found[handle] for handle in handles[place]])
            if progress is not None:
                stats, running = engine.stats, engine.num_running
                tokens, seconds = stats.generated_tokens, stats.seconds
                progress(Progress(len(found), running, total, tokens, seconds))
    except BaseException:
        engine.abort(handle for group in handles for handle in group)
        raise
    return [[found[handle] for handle in group] for group in handles]


class Periods:
    """What an engine has done since this was made, which it counts in a new record each time that
    it had nothing to do.
    """

    def __init__(self, engine: Sampler) -> None:
        """Of an engine without live samples."""
        self._engine, self._began = engine, perf_counter()
        self._records = [engine.stats]
        """The first is of what was done before."""
        self.total = EngineStats()

    def note(self) -> None:
        """Bring ``total`` up to date, which stays the same object."""
        if self._records[-1] is not self._engine.stats:
            self._records.append(self._engine.stats)
        found = sum(self._records[1:], EngineStats())
        for field in fields(EngineStats):
            setattr(self.total, field.name, getattr(found, field.name))
        self.total.seconds = perf_counter() - self._began


def check_is_free(engine: Sampler) -> None:
    """Raises RequestError where a sample is live."""
    if engine.num_live:
        raise RequestError(
            f"generate needs the engine for itself, and {engine.num_live} samples of it are live: "
            "their events would be lost; step until they have ended, or abort them"
        )
