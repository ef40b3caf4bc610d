"""Requests to an engine, the names of their samples, and the checks that refuse a request which
contradicts itself or can never be served.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isobit.kernels.noise import sample_key
from isobit.memory.cache_size import pages_for
from isobit.records.text import Prompt, SamplingParams
from isobit.util.errors import RequestError

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
    """The requests that the samples belong to, by prompt and visit.

    Raises:
        RequestError: where a sample is among the ``live`` ones.
    """
    for handle in samples:
        if handle in live:
            raise RequestError(
                f"sample {handle.sample} of prompt {handle.prompt_id!r}, visit {handle.visit}, is "
                "here already: taken on twice it would be drawn twice; withdraw it first"
            )
    by_name = {(request.prompt.id, request.visit): request for request in requests}
    names = dict.fromkeys((sample.prompt_id, sample.visit) for sample in samples)
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
class EngineLimits:
    """The limits of the model and the cache: positions, vocabulary entries, pages and their tokens;
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
    requests: Sequence[Request], limits: EngineLimits, live: Collection[Handle] = ()
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


def _check_prompt(request: Request, limits: EngineLimits) -> None:
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
