"""Chat messages, their calls of tools, tools and template variables, as datasets and clients write
them.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from isobit.util.errors import DataError

Message: TypeAlias = Mapping[str, Any]
"""A chat message: ``role``, mostly ``content``, and whatever else chat templates read, such as
``tool_calls``, ``tool_call_id``, ``name`` and ``reasoning_content``.
"""
Messages: TypeAlias = tuple[Message, ...]
VARIABLES_COLUMN = "chat_template_kwargs"
"""The column with variables of the chat template for one row, as TRL calls it."""


def as_messages(prompt: str | Messages) -> Messages:
    """A prompt as messages: text is what the user says."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def without_beginning(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """A conversation without the beginning of an answer in its last message, and that beginning;
    empty where it ends in a question.
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return messages, ""
    return messages[:-1], messages[-1].get("content") or ""


def read_prompt(value: Any, place: str) -> str | Messages:
    """A prompt as a dataset has it. Raises ``DataError``, naming ``place``, for anything else."""
    check_depth(value, place)
    value = written_messages(value) if isinstance(value, str) else _from_sharegpt(_listed(value))
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and any(map(_has_role, value)):
        return tuple(
            message_of(message, f"{place}, message {n}") for n, message in enumerate(value, 1)
        )
    raise DataError(
        f"{place}: expected text or a list of messages with 'role' and 'content', found "
        f"{_shown(value)}"
    )


_DEEPEST = 100
"""Containers within containers of a message, a tool or a variable: what renders them calls itself
for each, and Python ends that at some hundreds.
"""


def check_depth(value: Any, place: str) -> None:
    """Raise ``DataError``, naming ``place``, for what is nested too deeply for a conversation."""
    if _is_deep(value):
        raise DataError(
            f"{place}: nested too deeply; expected at most {_DEEPEST} lists and tables within one "
            "another"
        )


def _is_deep(value: Any, left: int = _DEEPEST) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return False
    parts = value.values() if isinstance(value, Mapping) else value
    return left == 0 or any(_is_deep(part, left - 1) for part in parts)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _listed(value: Any) -> Any:
    """The lists in arrays, as which pandas reads those of Parquet, at any depth."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def _from_sharegpt(value: Any) -> Any:
    """Messages of the form ``{"from": "human", "value": ".."}`` in the usual one, with other keys
    as they are.
    """
    if not isinstance(value, list) or not value:
        return value
    roles = {**_SHAREGPT, "system": "system"}
    if not all(isinstance(turn, Mapping) and turn.keys() >= {"from", "value"} for turn in value):
        return value
    if not all(turn["from"] in roles and not {"role", "content"} & turn.keys() for turn in value):
        return value
    names = {"from": "role", "value": "content"}
    plain = ({**turn, "from": roles[turn["from"]]} for turn in value)
    return [{names.get(key, key): content for key, content in turn.items()} for turn in plain]


_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{.*["']role["']\s*:""", re.DOTALL)


def written_messages(text: str) -> str | list[Any]:
    """The conversation that ``text`` writes down, as JSON or as Python writes a list, which is how
    it is found in CSV files; the text itself if it is no conversation.
    """
    if not _LIKE_MESSAGES.match(text) or not text.rstrip().endswith("]"):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            content = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(content, list) and content and all(map(_has_role, content)):
            return content
    return text


def message_of(item: Any, place: str) -> dict[str, Any]:
    """A message with every field that is not null, its content as one text, and its calls of tools
    with arguments that are a table or the JSON text of one.  An empty list of parts or calls is
    left out.

    Raises ``DataError``, naming ``place``, for anything else, and for a message that says nothing.
    """
    check_depth(item, place)
    if not _has_role(item):
        raise DataError(
            f"{place}: expected a message with 'role' and 'content', found {_shown(item)}"
        )
    fields = {name: value for name, value in item.items() if value is not None}
    if "function_call" in fields:  # OpenAI's older form
        fields.setdefault("tool_calls", [{"type": "function", "function": fields["function_call"]}])
    if "tool_calls" in fields:
        fields["tool_calls"] = _read_calls(fields["tool_calls"], place)
    for name in ("content", "tool_calls"):
        if _is_list(fields.get(name)) and not fields[name]:
            del fields[name]
    if "content" in fields:
        content = fields["content"]
        if not isinstance(content, str) and not is_parts(content):
            raise DataError(
                f"{place}: expected text or a list of parts as 'content', found {_shown(content)}"
            )
        fields["content"] = message_text(content, place)
    elif not any(value for name, value in fields.items() if name != "role"):
        raise DataError(
            f"{place}: the message says nothing: it has neither 'content' nor calls of tools, "
            f"found {_shown(item)}"
        )
    return fields


def _has_role(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str)


def _read_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """The calls of tools in a message."""
    calls = _from_json(value)
    if calls is None or calls == "":
        return []
    if not _is_list(calls):
        raise DataError(f"{place}: expected a list as 'tool_calls', found {_shown(value)}")
    return [_read_call(call, f"{place}, tool call {n}") for n, call in enumerate(calls, 1)]


def _read_call(call: Any, place: str) -> dict[str, Any]:
    """A call, whose arguments are {} where they are missing, null or empty text."""
    is_wrapped = isinstance(call, Mapping) and "function" in call
    function = call["function"] if is_wrapped else call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{place}: expected {{'type': 'function', 'function': {{'name': '..', 'arguments': "
            f"{{..}}}}}}, found {_shown(call)}"
        )
    arguments = function.get("arguments", function.get("parameters"))
    table = arguments
    if isinstance(arguments, str):
        table = _from_json(arguments) if arguments.strip() else None
    if table is not None and not isinstance(table, Mapping):
        raise DataError(
            f"{place}: the arguments of {name!r} are a table or its JSON text, found "
            f"{_shown(arguments)}"
        )
    filled = {**function, "arguments": {} if table is None else arguments}
    return {**call, "function": filled} if is_wrapped else filled


def is_parts(content: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether the content of a message is a list of parts: ``[{"type": "text", "text": ".."}]``."""
    return (
        isinstance(content, Sequence)
        and not isinstance(content, str)
        and len(content) > 0
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    )


def message_text(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a message or its parts. Raises DataError for a part that is not text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place}: a message has a part of type {part['type']!r}; only parts of text can "
                "be read: {'type': 'text', 'text': '..'}"
            )
    return "".join(part["text"] for part in content)


def read_tools(value: Any, place: str) -> Sequence[Mapping[str, Any]] | None:
    """The tools of a row: a list of JSON schemas, each of which may be JSON text, or JSON text of
    the list. None for no tools.
    """
    check_depth(value, place)
    tools = _listed(_from_json(value))
    if tools is None or tools in ([], ""):
        return None
    if isinstance(tools, list):
        tools = [_from_json(tool) for tool in tools]
        if all(isinstance(tool, Mapping) for tool in tools):
            return tuple(tools)
    raise DataError(
        f"{place}: expected tools for the chat template, a list of JSON schemas or its JSON text, "
        f"found {_shown(value)}; if that column is for the reward alone, set `tools` of this data "
        "set to '' or to another column"
    )


def _from_json(value: Any) -> Any:
    """The content of JSON text; anything else as it is, also text that is nested too deeply."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return value if _is_deep(content) else content


def read_variables(value: Any, place: str) -> Mapping[str, Any]:
    """Variables of the chat template: a table, or its JSON text."""
    check_depth(value, place)
    variables = _from_json(value)
    if variables is None or variables == "":
        return {}
    if not isinstance(variables, Mapping):
        raise DataError(
            f"{place}, column {VARIABLES_COLUMN!r}: expected a table of variables of the chat "
            f"template or its JSON text, found {_shown(value)}"
        )
    return dict(variables)


def other_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same messages with calls of tools in other forms: half of the templates want the
    arguments as a table and half as JSON text, and some want content where there is none.
    """
    filled = [{"content": "", **message} for message in messages]
    for variant in (messages, filled):
        for change in (lambda arguments: arguments, _read, _write):
            other = [_with_arguments(message, change) for message in variant]
            if other != list(messages):
                yield other


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    tables = [call for call in calls if isinstance(call, Mapping)] if _is_list(calls) else []
    functions = ((call.get("function"), call) for call in tables)
    return [function if isinstance(function, Mapping) else call for function, call in functions]


def _is_list(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def written_arguments(message: Message) -> list[str]:
    """The arguments of a message's calls of tools that are JSON text."""
    arguments = [call.get("arguments") for call in calls_of(message)]
    return [one for one in arguments if _is_table_text(one)]


def with_probed_arguments(message: Message, probe: str) -> Message:
    """The message with ``probe`` in place of arguments that are JSON text."""
    return _with_arguments(message, lambda one: probe if _is_table_text(one) else one)


def _is_table_text(arguments: Any) -> TypeGuard[str]:
    return isinstance(arguments, str) and isinstance(_read(arguments), Mapping)


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _write(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_read_arguments(message: Message) -> Message:
    """The message with arguments in JSON text as tables."""
    return _with_arguments(message, _read)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with other arguments of its calls of tools."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        fields = dict(call)
        if "function" in fields:
            fields["function"] = changed(fields["function"])
        if "arguments" in fields:
            fields["arguments"] = change(fields["arguments"])
        return fields

    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [changed(call) for call in calls]} if _is_list(calls) else message
    )
