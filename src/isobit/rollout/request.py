"""What an engine is asked for, and the refusal of what no engine could do with it."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isobit.errors import RequestError
from isobit.records.text import Prompt, SamplingParams

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


def distinct_requests(
    samples: Iterable[tuple[Request, int]], live: Collection[Handle]
) -> list[Request]:
    """The requests of samples that come one by one, each once.

    Raises:
        RequestError: where a sample comes twice, or is among the ``live`` ones.
    """
    seen, requests = set(live), dict[tuple[str, int], Request]()
    for request, sample in samples:
        handle = Handle(request.prompt.id, request.visit, sample)
        if handle in seen:
            raise RequestError(
                f"sample {sample} of prompt {request.prompt.id!r}, visit {request.visit}, is here "
                "already: taken on twice it would be drawn twice; withdraw it first"
            )
        seen.add(handle)
        requests[request.prompt.id, request.visit] = request
    return list(requests.values())


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
