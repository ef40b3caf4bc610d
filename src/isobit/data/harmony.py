"""Calls of tools in harmony, the format of gpt-oss, in which a turn is a row of messages:

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}

A message whose header names a recipient is a call, in whichever channel it is; gpt-oss's templates
write the recipient ahead of the channel. <|call|> ends it and the turn, which so has one call.
Nothing in the text of a message is a call.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.data.call_values import json_at, shown_at
from isobit.data.parsed_calls import MalformedCall, Parsed, Said, begun, named_call

CHANNEL = "<|channel|>"
_START, _ENDS = "<|start|>", ("<|end|>", "<|call|>", "<|return|>")
_NAMESPACE = "functions."
_SPEAKERS = frozenset({"assistant", "user", "all"})
"""Recipients that are no tools."""
_HEADER = re.compile(
    r"\s*+(?:(?P<start><\|start\|>)\s*+(?P<role>[^\s<]*+)\s*+)?+"
    r"(?:to=(?P<ahead>[^\s<]++)\s*+)?+"
    r"(?:(?P<channel><\|channel\|>)\s*+(?!to=)(?P<name>[^\s<]*+)\s*+(?:to=(?P<behind>[^\s<]++)\s*+)?+)?+"
    r"(?P<rest>[^<]*+)(?:<\|constrain\|>[^<]*+)?+"
    r"(?:(?P<message><\|message\|>)|(?=<\|(?:end|call|return|start)\|>)"
    r"|(?P<open>(?:<(?:\|\w*+\|?+)?+)?+\Z))"
)
"""Matches a header up to its message, or to what ends it without one, or to the text's end."""
_OVER = re.compile(
    rf"(?P<over>{'|'.join(map(re.escape, _ENDS))})|(?P<next>(?={re.escape(_START)}))"
    rf"|(?<!\s)\s++(?:(?P<behind>(?={re.escape(_START)}))|{begun(_START)}|\Z)"
    rf"|{'|'.join(map(begun, (*_ENDS, _START)))}|\Z"
)
"""Matches the end of a message, by a group, or what stands at the text's end and may become one."""


class HarmonyReader:
    """Reads a turn as it arrives, as ``isobit.data.parsed_calls.TurnReader``.

    Args:
        tools: names of the request's tools.
        is_thinking: whether the prompt ends in the header of the turn's first message.
    """

    def __init__(self, tools: Collection[str], is_thinking: bool) -> None:
        self._tools = tools
        self._is_inside = is_thinking
        """Whether the held text begins in that of a message, rather than in a header."""
        self._held: list[str] = []
        self._holds_call = False

    @property
    def held(self) -> str:
        return "".join(self._held)

    def feed(self, text: str) -> str:
        if self._holds_call:
            self._held.append(text)
            return ""
        text = self.held + text
        header, place = self._next(text, 0)
        self._held = [text[place:]]
        self._holds_call = header is not None and header["open"] is None
        return text[:place]

    def finish(self) -> Said:
        text, begin, count = self.held, 0, 0
        calls: list[Parsed] = []
        header, place = self._next(text, 0)
        while header is not None and _recipient(header):
            count += 1
            if not calls:
                begin = place
                call, place = self._call(header)
                calls.append(call)
            else:
                place = header.end()
            self._is_inside = True
            header, place = self._next(text, place)
        if count > 1:
            problem = f"a turn has one call, which ends in <|call|>; this one has {count}"
            calls.append(MalformedCall(problem, calls[0].name))
        return Said(text[:begin] if calls else text, calls)

    def _next(self, text: str, place: int) -> tuple[re.Match[str] | None, int]:
        """The next header that names a recipient, or may become one with more text, and where it
        begins; without one None, and where what may be part of one begins.
        """
        while True:
            if self._is_inside:
                over = _OVER.search(text, place)
                assert over is not None  # the end of the text fits
                if over.lastgroup is None:
                    return None, over.start()
                place, self._is_inside = over.end(), False
            header = _header_at(text, place)
            if header is not None and (header["open"] is not None or _recipient(header)):
                return header, place
            self._is_inside = True
            if header is not None:
                place = header.end()
            elif text.startswith(_START, place):
                place += len(_START)

    def _call(self, header: re.Match[str]) -> tuple[Parsed, int]:
        """The call that a header begins, and where it ends."""
        recipient, text = _recipient(header), header.string
        name, place = recipient.removeprefix(_NAMESPACE), header.end()
        if name == recipient and name not in self._tools:
            problem = f"a call is to={_NAMESPACE}name, found {f'to={recipient}'!r:.60}"
            return MalformedCall(problem, name), place
        if not header["message"]:
            problem = "the arguments of a call stand behind <|message|>, which is missing"
            return MalformedCall(problem, name), place
        begin = _BLANK.match(text, place)
        place = begin.end() if begin else place
        is_empty = place == len(text) or bool(_OVER.match(text, place))
        value, problem, end = (None, "", place) if is_empty else json_at(text, place)
        behind = _BLANK.match(text, end)
        end = behind.end() if behind else end
        if not problem and end < len(text) and not _ENDED.match(text, end):
            problem = f"there is text behind the JSON object: {shown_at(text, end)}"
        call = MalformedCall(problem) if problem else named_call(name, value)
        return (replace(call, name=name) if isinstance(call, MalformedCall) else call), end


class AnswerReader:
    """Leaves the channel ``analysis`` and all headers out of a turn that arrives in pieces; text
    without them stays as it is. ``is_thinking`` is as for ``HarmonyReader``.
    """

    def __init__(self, is_thinking: bool) -> None:
        self._is_inside, self._is_shown, self._held = is_thinking, not is_thinking, ""

    def feed(self, text: str, is_last: bool) -> str:
        """Take more of the turn, and give back what is seen of it so far; with ``is_last`` all."""
        text, place, seen = self._held + text, 0, list[str]()
        while True:
            if self._is_inside:
                over = _OVER.search(text, place)
                assert over is not None  # the end of the text fits
                is_over = over.lastgroup is not None
                end = len(text) if is_last and not is_over else over.start()
                seen.append(text[place:end] if self._is_shown else "")
                if not is_over:
                    self._held = text[end:]
                    return "".join(seen)
                place, self._is_inside = over.end(), False
            header = _header_at(text, place)
            if header is not None and header["open"] is not None:
                self._held = text[place:]
                return "".join(seen)
            self._is_inside = True
            if header is not None:
                self._is_shown = header["name"] != "analysis" or bool(_recipient(header))
                place = header.end()
            elif text.startswith(_START, place):
                place += len(_START)


def writes_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes messages and calls in harmony."""
    templates: Any = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [str(templates or "")]
    return any(CHANNEL in text and "<|call|>" in text for text in texts)


_BLANK = re.compile(r"\s*+")
_ENDED = re.compile("|".join(map(re.escape, (*_ENDS, _START))))


def _header_at(text: str, place: int) -> re.Match[str] | None:
    """The header that begins at ``place``, or may do so with more text."""
    header = _HEADER.match(text, place)
    if header is None or header["start"] or header["ahead"] or header["channel"]:
        return header
    is_begun = header["open"] is not None and header["rest"].strip() in ("", "t", "to")
    return header if is_begun else None


def _recipient(header: re.Match[str]) -> str:
    """The tool that a header of the assistant names; empty for none."""
    named = header["behind"] or header["ahead"] or ""
    is_own = header["role"] in (None, "", "assistant")
    return named if is_own and named not in _SPEAKERS else ""
