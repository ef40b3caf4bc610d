"""What is read of a turn: its text, and calls of tools or what is wrong with them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from isobit.data.call_values import json_at, shown_at

MOST_CALLS = 16
"""Calls in a turn; those beyond are answered with an error."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    """Arguments by name."""
    positional: tuple[Any, ...] = ()
    """Arguments without a name, which only ``plain`` has."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    problem: str
    """A message to the model: what is wrong, and what is expected."""
    name: str = ""
    """The tool that is called, where the format says it outside of what cannot be read."""


Parsed = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class Said:
    """The text and the calls of one turn."""

    text: str
    """Up to the first call, without white space ahead of it; all of it where there is no call."""
    calls: list[Parsed]


class TurnReader(Protocol):
    """Reads a turn as it arrives."""

    @property
    def held(self) -> str:
        """The text that ``feed`` has not given back yet."""
        ...

    def feed(self, text: str) -> str:
        """Take more of the turn, and give back the text that no continuation can make part of a
        call. From the first call on, everything is held.
        """
        ...

    def finish(self, has_ended: bool = True) -> Said:
        """The text and the calls of the held text, once the turn has ended, or, without
        ``has_ended``, was cut.
        """
        ...


def function_of(value: Any) -> Any:
    """The content below ``function`` in OpenAI's form of a call."""
    is_wrapped = isinstance(value, Mapping) and isinstance(value.get("function"), Mapping)
    return value["function"] if is_wrapped else value


def call_of(value: Any) -> Parsed:
    value = function_of(value)
    if not isinstance(value, Mapping) or "name" not in value:
        return MalformedCall('a call is a JSON object with "name" and "arguments"')
    given = [value.get(key) for key in ("arguments", "parameters")]
    first, *others = [one for one in given if one not in (None, "", {})] or [None]
    if any(other != first for other in others):
        return MalformedCall('a call has "arguments" or "parameters", and not both')
    return named_call(value["name"], first)


def named_call(name: Any, arguments: Any) -> Parsed:
    """A call; null, an empty text and their JSON are no arguments."""
    if not isinstance(name, str) or not name:
        return MalformedCall("the name of a call is a text")
    if isinstance(arguments, str):
        text = arguments.strip()
        arguments, problem, end = json_at(text, 0) if text else (None, "", 0)
        if not problem and end < len(text):
            problem = f"there is text behind it: {shown_at(text, end)}"
        if problem:
            return MalformedCall(f"the arguments are a text that is no JSON: {problem}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        return MalformedCall("the arguments of a call are a JSON object")
    return ToolCall(name, dict(arguments))


def begun(mark: str) -> str:
    """A pattern for the first characters of ``mark`` where the text ends with them."""
    pattern = ""
    for character in reversed(mark):
        pattern = re.escape(character) + (rf"(?:{pattern}|\Z)" if pattern else "")
    return pattern
