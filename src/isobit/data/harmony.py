"""Calls of tools in harmony, the format of gpt-oss, in which a turn is a row of messages:

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}

A message whose header names a recipient is a call, in whichever channel it is and wherever in the
header; gpt-oss's templates write the recipient ahead of the channel. <|call|> ends it and the turn,
which so has one call.  Nothing in the text of a message is a call.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobit.data.call_values import json_at, shown_at
from isobit.data.parsed_calls import MalformedCall, Parsed, Said, begun, named_call
from isobit.data.thinking import Portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHANNEL = "<|channel|>"
_START, _ENDS = "<|start|>", ("<|end|>", "<|call|>", "<|return|>")
_NAMESPACE = "functions."
_SPEAKERS = frozenset({"assistant", "user", "all"})
"""Recipients that are no tools."""
_LONGEST = 400
"""Characters of a part of a header; a longer one is text."""
_PART = rf"[^<]{{0,{_LONGEST}}}+"
_TOKENS = (*_ENDS, _START, CHANNEL, "<|constrain|>", "<|message|>")
_HEADER = re.compile(
    rf"\s*+(?P<start><\|start\|>)?+(?P<ahead>{_PART})"
    rf"(?:(?P<channel><\|channel\|>)(?P<behind>{_PART}))?+"
    rf"(?:<\|constrain\|>(?P<content>{_PART}))?+"
    r"(?:(?P<message><\|message\|>)|(?=<\|(?:end|call|return|start)\|>)"
    rf"|(?P<open>(?:{'|'.join(map(begun, _TOKENS))})?+\Z))"
)
"""Matches a header up to its message, or to what ends it without one, or to the text's end."""
_TO = re.compile(r"(?<!\S)to=\s*+(?P<name>\S++)")
_NAME = re.compile(r"\s*+\w*+\s*+")
_WORD = re.compile(r"\s*+(?!to=)(?P<word>\S*+)\s*+")
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
        self._is_blank = True

    @property
    def held(self) -> str:
        return "".join(self._held)

    def feed(self, text: str) -> str:
        if self._holds_call or (self._is_blank and text.isspace()):
            self._held.append(text)
            return ""
        text = self.held + text
        header, place = self._next(text, 0)
        self._held = [text[place:]]
        self._holds_call = header is not None and header["open"] is None
        self._is_blank = not text[place:].strip()
        return text[:place]

    def finish(self, has_ended: bool = True) -> Said:
        text, begin, count = self.held, 0, 0
        calls: list[Parsed] = []
        header, place = self._next(text, 0)
        while header is not None and _is_named(header):
            count += 1
            if not calls:
                begin = place
                call, place = self._call(header, has_ended)
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

    def _call(self, header: re.Match[str], has_ended: bool) -> tuple[Parsed, int]:
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
        if place == len(text) and not has_ended:
            return MalformedCall("the turn was cut ahead of the call's arguments", name), place
        is_empty = place == len(text) or bool(_ENDED.match(text, place))
        value, problem, end = (None, "", place) if is_empty else json_at(text, place)
        behind = _BLANK.match(text, end)
        end = behind.end() if behind else end
        if not problem and end < len(text) and not _ENDED.match(text, end):
            problem = f"there is text behind the JSON object: {shown_at(text, end)}"
        call = MalformedCall(problem) if problem else named_call(name, value)
        return (replace(call, name=name) if isinstance(call, MalformedCall) else call), end


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text of one message, or of a header that has no message."""

    text: str
    message: int
    """The number of the message in the turn."""
    channel: str
    is_call: bool


class _MessageReader:
    """Tells the messages of a turn that arrives in pieces apart; text without a header is one of a
    channel without a name.
    """

    def __init__(self, is_thinking: bool) -> None:
        self._is_inside = is_thinking
        self._now = _Piece("", 0, "analysis" if is_thinking else "", is_call=False)
        self._held: list[str] = []
        self._is_blank = True

    def feed(self, text: str, is_last: bool) -> list[_Piece]:
        """Take more of the turn, and give back what of it belongs to a message; with ``is_last``
        all.
        """
        if self._is_blank and text.isspace() and not is_last:
            self._held.append(text)
            return []
        text, place, pieces = "".join(self._held) + text, 0, list[_Piece]()
        while True:
            if self._is_inside:
                over = _OVER.search(text, place)
                assert over is not None  # the end of the text fits
                is_over = over.lastgroup is not None
                end = len(text) if is_last and not is_over else over.start()
                pieces.append(replace(self._now, text=text[place:end]))
                if not is_over:
                    return self._hold(text[end:], pieces)
                place, self._is_inside = over.end(), False
            header = _header_at(text, place)
            if header is not None and header["open"] is not None and not is_last:
                return self._hold(text[place:], pieces)
            self._is_inside = True
            number = self._now.message + 1
            if header is None or (header["open"] is not None and not _is_marked(header)):
                self._now = _Piece("", number, "", is_call=False)
                place += len(_START) if text.startswith(_START, place) else 0
                continue
            self._now = _Piece("", number, _channel(header), bool(_recipient(header)))
            place = header.end()
            if not header["message"]:
                pieces.append(replace(self._now, text=_unsent(header)))

    def _hold(self, text: str, pieces: list[_Piece]) -> list[_Piece]:
        self._held, self._is_blank = [text], not text.strip()
        return pieces


class AnswerReader:
    """Tells the channel ``analysis`` from the rest of a turn that arrives in pieces, without
    headers; text without them is answer, and so is what a header holds that has no message, beside
    its names. ``is_thinking`` is as for ``HarmonyReader``.
    """

    def __init__(self, is_thinking: bool) -> None:
        self._messages = _MessageReader(is_thinking)

    def feed(self, text: str, is_last: bool) -> Portions:
        """Take more of the turn, and give back what can be told of it so far; with ``is_last``
        all.
        """
        thinking, answer = list[str](), list[str]()
        for one in self._messages.feed(text, is_last):
            is_thought = one.channel == "analysis" and not one.is_call
            (thinking if is_thought else answer).append(one.text)
        return Portions("".join(thinking), "".join(answer))


def final_answer(text: str, is_thinking: bool) -> str | None:
    """The last message of the channel ``final`` in a turn; None where there is none."""
    pieces = _MessageReader(is_thinking).feed(text, is_last=True)
    final = [one for one in pieces if one.channel == "final" and not one.is_call]
    if not final:
        return None
    return "".join(one.text for one in final if one.message == final[-1].message)


def begins_in_harmony(text: str) -> bool:
    """Whether a turn begins with a header, or with the tokens that begin one."""
    header = _header_at(text, 0)
    is_marked = header is not None and _is_marked(header)
    return is_marked or text.lstrip().startswith((CHANNEL, _START))


def writes_harmony(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template writes messages and calls in harmony."""
    templates: Any = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [str(templates or "")]
    return any(CHANNEL in text and "<|call|>" in text for text in texts)


_BLANK = re.compile(r"\s*+")
_ENDED = re.compile("|".join(map(re.escape, (*_ENDS, _START))))


def _header_at(text: str, place: int) -> re.Match[str] | None:
    """The header that begins at ``place``, or may do so with more text."""
    header = _HEADER.match(text, place)
    if header is None or header["start"]:
        return header
    ahead = header["ahead"].strip()
    if header["channel"] or header["message"] or header["content"] is not None:
        is_header = bool(_TO.match(ahead)) or (not ahead and bool(header["channel"]))
    else:
        is_begun = ahead in ("", "t", "to") or ahead.startswith("to=")
        is_header = header["open"] is not None and is_begun
    return header if is_header else None


def _is_marked(header: re.Match[str]) -> bool:
    """Whether a token of harmony stands in a header; else it may be other text that ends there."""
    return any(header[one] is not None for one in ("start", "channel", "content", "message"))


def _is_named(header: re.Match[str]) -> bool:
    return _is_marked(header) and bool(_recipient(header))


def _channel(header: re.Match[str]) -> str:
    found = _WORD.match(header["behind"] or "")
    return found["word"] if found else ""


def _recipient(header: re.Match[str]) -> str:
    """The tool that a header of the assistant names; empty for none."""
    role = _WORD.match(header["ahead"]) if header["start"] else None
    if role is not None and role["word"] not in ("", "assistant"):
        return ""
    parts = (header[one] or "" for one in ("behind", "ahead", "content"))
    named = next((found["name"] for found in map(_TO.search, parts) if found), "")
    return "" if named in _SPEAKERS else named


def _unsent(header: re.Match[str]) -> str:
    """The text that a header without a message holds: all of a call, which cannot be read, and else
    what stands behind the names.
    """
    if _recipient(header):
        return header[0]
    parts = [header[one] or "" for one in ("ahead", "behind", "content")]
    ends = [found.end() for part in parts if (found := _NAME.match(part))]
    rest = [part[end:] for part, end in zip(parts, ends, strict=True)]
    return "".join([*rest, header["open"] or ""])
