"""Text as it grows, and stop strings in it, although a token may hold half a character and a stop
string may span tokens.

Decoding a token alone can be wrong (a leading space that depends on its neighbour, a piece of a
UTF-8 character), and decoding the whole answer after each token is quadratic.  So a window of the
last tokens is decoded, once without and once with the newest: what the second text has on top of
the first is new.  While the new text ends in U+FFFD, a character is incomplete and the window waits
for the rest of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """The text of ``token_ids`` as users and rewards see it: special tokens left out, spaces as
    they are.
    """
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """``text`` before the first place where any of ``stop_strings`` begins."""
    places = [place for place in map(text.find, stop_strings) if place >= 0]
    return text[: min(places)] if places else text


class GrowingText:
    """The text of one answer, a token at a time."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """Tokens decoded again for context, then those whose text is not complete yet."""
        self._settled = 0  # how many of them belong to the context

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Take the next token; the text behind what was complete before, and whether all of it is
        complete now.
        """
        self._window.append(token_id)
        settled = decode(self._tokenizer, self._window[: self._settled])
        new = decode(self._tokenizer, self._window)[len(settled) :]
        complete = bool(new) and not new.endswith(_INCOMPLETE)
        if complete:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return new, complete


class StopWatch:
    """Follows the text of one sample and says when a stop string is complete."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_strings: Sequence[str]) -> None:
        self._text = GrowingText(tokenizer)
        self._stop_strings = tuple(stop_strings)
        self._overlap = max(map(len, stop_strings)) - 1
        self._tail = ""
        """The last characters of the complete text: a stop string may have begun there."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; whether the text now holds a stop string."""
        new, complete = self._text.feed(token_id)
        candidate = self._tail + new.rstrip(_INCOMPLETE)
        if complete:
            self._tail = candidate[-self._overlap :] if self._overlap else ""
        return any(stop in candidate for stop in self._stop_strings)
