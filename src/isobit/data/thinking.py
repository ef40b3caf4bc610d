"""Thinking and answer of a turn that arrives in pieces, told apart.

``TaggedReader`` reads thinking between tags at the beginning of a turn, as most templates have it;
``isobit.data.harmony.AnswerReader`` reads gpt-oss's channels.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

from isobit.data.parsed_calls import begun
from isobit.records.text import THINK_TAG, THOUGHT_TAG

OPENING_TAGS = "<thinking>", "<think>", "[THINK]"
CLOSING_TAGS = "</thinking>", "</think>", "[/THINK]"
THINKING_TAGS = (*OPENING_TAGS, *CLOSING_TAGS)
_OPENS = re.compile(
    rf"\s*+(?:(?P<tag>{THINK_TAG.pattern})"
    rf"|(?P<open>(?:{'|'.join(map(begun, OPENING_TAGS))})?+\Z))"
)
"""Matches a tag at the beginning of a turn, or text that may become one."""
_CLOSES = re.compile(
    rf"(?P<tag>{THOUGHT_TAG.pattern})"
    rf"|{'|'.join(map(begun, CLOSING_TAGS))}|\Z"
)
_TAGS = re.compile(rf"(?P<opens>{THINK_TAG.pattern})|{THOUGHT_TAG.pattern}")


class Portions(NamedTuple):
    """What of a piece of a turn is thinking, and what is the answer."""

    thinking: str
    answer: str


def is_left_thinking(is_thinking: bool, text: str) -> bool:
    """Whether ``text`` leaves its reader within thinking between tags; ``is_thinking``: whether it
    begins there.
    """
    tags = [*_TAGS.finditer(text)]
    return tags[-1]["opens"] is not None if tags else is_thinking


class _Remover:
    """Takes ``tags`` out of a text that arrives in pieces."""

    def __init__(self, tags: Collection[str]) -> None:
        whole, part = "|".join(map(re.escape, tags)), "|".join(map(begun, tags))
        self._tags = re.compile(rf"(?P<tag>{whole})|(?:{part})") if tags else None
        self._held = ""

    def feed(self, text: str, is_last: bool) -> str:
        if self._tags is None:
            return text
        text, self._held = self._held + text, ""
        kept, place = list[str](), 0
        for tag in self._tags.finditer(text):
            if tag["tag"] is None and is_last:
                break
            kept.append(text[place : tag.start()])
            self._held, place = "" if tag["tag"] else tag[0], tag.end()
        return "".join([*kept, text[place:]])


class TaggedReader:
    """Tells the text between the tags around thinking from the text behind them. Tags belong to
    neither, nor do line breaks behind the closing one, nor white space alone between them;
    thinking that never ends has no answer.
    """

    def __init__(
        self, is_thinking: bool, begun: str = "", unseen_tags: Collection[str] = ()
    ) -> None:
        """
        Args:
            is_thinking: whether the prompt, up to ``begun``, ends in the tag that opens thinking.
            begun: the beginning of the turn that is in the prompt already.
            unseen_tags: tags that are left out wherever they stand.
        """
        self._is_thinking = is_thinking
        self._is_start = not is_thinking
        """Whether the text may still begin with that tag."""
        self._is_blank = True
        """Whether nothing but white space has been thought."""
        self._is_behind = False
        """Whether nothing but line breaks stands behind the closing tag."""
        self._held: list[str] = []
        if begun.strip():
            self._told(begun, is_last=True)
        self._of_thinking, self._of_answer = _Remover(unseen_tags), _Remover(unseen_tags)

    def feed(self, text: str, is_last: bool) -> Portions:
        """Take more of the turn, and give back what can be told of it so far; with ``is_last``
        all.
        """
        thinking, answer = self._told(text, is_last)
        is_over = is_last or self._is_behind
        return Portions(
            self._of_thinking.feed(thinking, is_over), self._of_answer.feed(answer, is_last)
        )

    def _told(self, text: str, is_last: bool) -> Portions:
        is_open = self._is_start or (self._is_thinking and self._is_blank)
        if is_open and text.isspace() and not is_last:
            self._held.append(text)
            return Portions("", "")
        text, self._held = "".join([*self._held, text]), []
        if self._is_start:
            tag = _OPENS.match(text)
            if tag is not None and tag["tag"] is None and not is_last:
                self._held = [text]
                return Portions("", "")
            self._is_start = False
            if tag is not None and tag["tag"] is not None:
                self._is_thinking, text = True, text[tag.end() :]
        thinking, text = self._thought(text, is_last) if self._is_thinking else ("", text)
        if self._is_behind:
            text = text.lstrip("\r\n")
            self._is_behind = not text
        return Portions(thinking, text)

    def _thought(self, text: str, is_last: bool) -> tuple[str, str]:
        """The thinking at the beginning of ``text``, and what stands behind its end."""
        tag = _CLOSES.search(text)
        assert tag is not None  # the end of the text fits
        is_over = tag["tag"] is not None
        end = len(text) if is_last and not is_over else tag.start()
        thinking, behind = text[:end], text[tag.end() :] if is_over else ""
        self._is_thinking, self._is_behind = not is_over, is_over
        if self._is_blank and not thinking.strip():
            end, thinking = 0, ""
        self._is_blank = not thinking and self._is_blank
        self._held = [] if is_over or is_last else [text[end:]]
        return thinking, behind
