"""The events of a followed sample: its new tokens, and the part of its text that is sure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.records.text import Completion
from isobit.rollout.engine import SampleEvent
from isobit.rollout.sequence import GrowingText, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleStream:
    """Follows one sample; with a tokenizer its text, too."""

    def __init__(self, sample: Sample, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._sample = sample
        self._num_seen = 0  # tokens
        sampling = sample.prompt.request.sampling
        self._text = (
            None
            if tokenizer is None
            else GrowingAnswer(tokenizer, sampling.stop_strings, sampling.special_tokens)
        )

    def event(self, completion: Completion | None = None) -> SampleEvent | None:
        """The next event, or None if nothing is new; ``completion`` once the sample has ended."""
        sample, first = self._sample, self._num_seen
        if completion is None and len(sample.log_probs) == first:
            return None
        token_ids = tuple(sample.tokens[len(sample.prompt.tokens) + first :])
        self._num_seen = len(sample.log_probs)
        text = ""
        if self._text is not None:
            text = self._text.rest(completion.text) if completion else self._text.feed(token_ids)
        truncates = sample.prompt.request.sampling.truncates
        truncated = sample.truncated_log_probs[first:] if truncates else ()
        log_probs, routings = tuple(sample.log_probs[first:]), tuple(sample.routings[first:])
        columns = log_probs, tuple(truncated), routings
        return SampleEvent(sample.handle, token_ids, *columns, text, completion)


class GrowingAnswer:
    """The text of a sample as far as it is sure."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_strings: Sequence[str],
        special: bool | frozenset[int] = False,
    ) -> None:
        self._text = GrowingText(tokenizer, special)
        self._stop_strings = stop_strings
        self._held = ""
        self._num_seen = 0  # characters

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, none of which ended the sample; the text that is sure now."""
        for token_id in token_ids:
            new, complete = self._text.feed(token_id)
            if complete:
                self._held += new
        sure = len(self._held) - self._possible_stop()
        text, self._held = self._held[:sure], self._held[sure:]
        self._num_seen += len(text)
        return text

    def rest(self, text: str) -> str:
        """The end of the final ``text`` that ``feed`` has not returned."""
        return text[self._num_seen :]

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
