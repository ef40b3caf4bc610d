"""What the engine is asked for, and the refusal of what it could never deliver.

Everything that can be known to fail is refused before the first forward, with the numbers: once a
batch has been accepted, every sequence of it can run to its full length alone in the cache, which
is why the scheduler never gets stuck.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isobit.errors import RequestError
from isobit.memory.cache_size import pages_for
from isobit.records.text import Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """``samples`` completions of one prompt.  ``visit`` counts how often a run has come back to the
    prompt: it keys the noise.
    """

    prompt: Prompt
    visit: int
    samples: int
    sampling: SamplingParams

    def max_length(self, context: int) -> int:
        """Tokens of the prompt and its longest possible completion within the model's context."""
        return min(len(self.prompt.token_ids) + self.sampling.max_new_tokens, context)


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


def check_requests(requests: Sequence[Request], limits: Limits) -> None:
    """Refuse the batch if any request of it can never be served.

    Raises:
        RequestError: naming the prompt, what it asks for and what there is.
    """
    seen: set[tuple[str, int]] = set()
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
        _check_prompt(request, limits)
        if request.sampling.stop_strings and not limits.has_tokenizer:
            raise RequestError(
                f"prompt {request.prompt.id!r} asks for stop strings, which need a tokenizer; this "
                "engine has none"
            )


def _check_sampling(request: Request) -> None:
    sampling = request.sampling
    wrong = {
        f"samples = {request.samples} must be at least 1": request.samples < 1,
        f"max_new_tokens = {sampling.max_new_tokens} must be at least 1": sampling.max_new_tokens
        < 1,
        f"temperature = {sampling.temperature} must be finite and not below 0": not 0
        <= sampling.temperature
        < math.inf,
        f"top_k = {sampling.top_k} must not be below 0": sampling.top_k < 0,
        f"top_p = {sampling.top_p} must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
        f"min_p = {sampling.min_p} must be at least 0 and below 1": not 0 <= sampling.min_p < 1,
        "an empty stop string would stop everything": "" in sampling.stop_strings,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise RequestError(f"prompt {request.prompt.id!r}: {message}")


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
    needed = pages_for(
        max_length - 1, limits.page_tokens
    )  # the last token of all is sampled, but never read back
    if needed > limits.num_pages:
        raise RequestError(
            f"prompt {prompt.id!r} can grow to {max_length} tokens ({num_tokens} of the prompt, at "
            f"most {request.sampling.max_new_tokens} "
            f"new, context {limits.context}): {needed} pages of {limits.page_tokens} tokens, and "
            f"the KV cache has {limits.num_pages}; "
            "raise rollout.kv_pages or rollout.kv_memory_gib, or lower rollout.max_new_tokens"
        )
