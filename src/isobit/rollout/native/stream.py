"""What a caller that follows a sample has not been told yet.

Text goes out when it can no longer change: whole characters, without the end that may turn out to
be the beginning of a stop string.  What is held back comes with the end of the sample, so that all
of it together is the text of the completion.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.records.text import Completion
from isobit.rollout.engine import SampleEvent
from isobit.rollout.native.sequence import Sample
from isobit.rollout.native.stops import GrowingText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleStream:
    """Follows one sample; with a tokenizer its text, too."""

    def __init__(self, sample: Sample, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._sample = sample
        self._told = 0  # tokens
        self._text = (
            None
            if tokenizer is None
            else GrowingAnswer(tokenizer, sample.prompt.request.sampling.stop_strings)
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
        log_probs = tuple(sample.log_probs[told:])
        return SampleEvent(sample.handle, token_ids, log_probs, text, completion)


class GrowingAnswer:
    """The text of a sample as far as it is sure."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_strings: Sequence[str]) -> None:
        self._text = GrowingText(tokenizer)
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
