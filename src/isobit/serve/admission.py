"""Limits of what the server accepts: samples in flight, and log-probabilities of a request."""

from collections.abc import Sequence
from math import ceil

from isobit.serve.errors import ApiError
from isobit.serve.protocol import GenerationRequest
from isobit.serve.token_texts import ScoredPrompt

LONGEST_RETRY_S = 60


class Gate:
    """Limits how many samples are in flight; requests beyond it get 429 with a retry delay."""

    def __init__(self, places: int) -> None:
        self.places, self.taken = places, 0
        self._seconds = 1.0
        """Seconds that a request has taken lately."""

    def enter(self, samples: int) -> None:
        """Raises ApiError where the samples do not fit."""
        if samples > self.places:
            raise ApiError(
                400,
                f"n: the request asks for {samples} samples; this server takes at most "
                f"{self.places} at once: ask for fewer",
                "n",
            )
        if self.taken + samples > self.places:
            wait = min(max(1, ceil(self._seconds)), LONGEST_RETRY_S)
            raise ApiError(
                429,
                f"{self.taken} of {self.places} places are taken, and the request needs {samples}: "
                f"try again in {wait} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        self.taken += samples

    def leave(self, samples: int, seconds: float) -> None:
        self.taken -= samples
        self._seconds += 0.1 * (seconds - self._seconds)


MOST_LOG_PROBS = 1 << 26
"""Log-probabilities of the prompts of a request, which are held until all are scored, in 8 bytes
each.
"""


def check_size(asked: GenerationRequest, prompts: Sequence[ScoredPrompt]) -> None:
    """Raises ApiError for more log-probabilities than are held at once."""
    if asked.scores_prompt is None:
        return
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    wanted = tokens * (1 + asked.scores_prompt)
    if wanted > MOST_LOG_PROBS:
        raise ApiError(
            400,
            f"prompt: {wanted:,} log-probabilities of {tokens:,} tokens are asked for; this server "
            f"holds at most {MOST_LOG_PROBS:,} at once: send fewer prompts in a request, or ask "
            "for fewer alternatives",
            "prompt",
        )
