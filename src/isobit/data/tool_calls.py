"""Calls of tools in the text of a model.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   Hermes and Qwen
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
                                                                        Qwen3.5, Qwen3-Coder
    llama3       {"name": "add", "parameters": {"a": 1}}                         Llama 3
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]            Mistral
                 [TOOL_CALLS]add[ARGS]{"a": 1}                                   its later models
    harmony      to=functions.add<|channel|>commentary json<|message|>{"a": 1}   gpt-oss
    plain        [add(1, b=2)]                                                   any model

All but the last are written by chat templates, which say what a model was trained with; ``plain``
is for tokenizers without a template, or with one that knows no tools.  Values are JSON, and where a
call ends is where its JSON does; but in ``qwen3_coder`` a value is a text, read as what the tool's
schema says of it, and ends at the first </parameter> that another tag of the format follows.  A
turn may hold several calls, except in ``harmony``, which ``isobit.data.harmony`` reads.

Nothing inside thinking is a call (``isobit.records.text.THINK``), also where the prompt has begun
the thinking, or it never ends.  Where an end of thinking has no beginning, all before it was
thinking.  In ``plain``, and without Llama 3's <|python_tag|>, no control token marks a call, so it
is one only if it names a tool of the request: any other JSON object is an answer.

Text is untrusted: reading never raises, and a call that cannot be read becomes a ``MalformedCall``,
whose problem the model is shown.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.call_values import json_at, shown_at, typed
from isobit.data.chat_template import mentions
from isobit.data.harmony import CHANNEL, HarmonyReader, writes_harmony
from isobit.data.parsed_calls import (
    MOST_CALLS,
    MalformedCall,
    Parsed,
    Said,
    ToolCall,
    TurnReader,
    begun,
    call_of,
    function_of,
    named_call,
)
from isobit.data.thinking import CLOSING_TAGS, OPENING_TAGS
from isobit.records.text import HARMONY, THINK, THOUGHT
from isobit.util.errors import ConfigError

_MOST_READ = 16 * MOST_CALLS
"""Marks of calls that are read in a turn; those beyond are only counted, because each JSON error
takes a time that grows with the text.
"""


Parameters = Mapping[str, Any]
"""The JSON schemas of a tool's parameters, by name; one that is not there may be anything."""


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Parameters]:
    """The parameters by tool of the schemas of tools, in OpenAI's form or in that below its
    ``function``.
    """
    return {str(one.get("name")): _properties(one) for one in map(function_of, tools)}


def _properties(function: Mapping[str, Any]) -> Parameters:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def read_turn(
    text: str,
    form: ToolFormat,
    tools: Mapping[str, Parameters],
    is_thinking: bool,
    has_ended: bool = True,
) -> Said:
    """Read one turn of a model: its text, and its calls in their order.

    Args:
        text: the turn with its special tokens, but for the one that ended it.
        tools: the parameters of the request's tools, by name.
        is_thinking: whether the prompt ends in the beginning of the model's thinking.
        has_ended: whether the model has ended the turn, rather than the length limit.
    """
    reader = turn_reader(form, tools, is_thinking)
    begin = reader.feed(text)
    rest = reader.finish(has_ended)
    return Said(begin + rest.text, rest.calls)


def turn_reader(form: ToolFormat, tools: Mapping[str, Parameters], is_thinking: bool) -> TurnReader:
    """A reader of a turn that arrives in pieces (``read_turn`` has the arguments)."""
    if form == "harmony":
        return HarmonyReader(tools, is_thinking)
    return _TagReader(form, tools, is_thinking)


class _TagReader:
    """Reads turns whose calls a mark begins, outside of tags around thinking."""

    def __init__(
        self, form: ToolFormat, tools: Mapping[str, Parameters], is_thinking: bool
    ) -> None:
        self._form: ToolFormat = form
        self._tools, self._is_thinking = tools, is_thinking
        self._events = _events(form, tuple(sorted(self._tools)))
        self._is_start = True
        """Whether nothing but white space stands behind the turn's beginning or its thinking."""
        self._held: list[str] = []
        self._holds_call = False

    @property
    def held(self) -> str:
        return "".join(self._held)

    def feed(self, text: str) -> str:
        if self._holds_call:
            self._held.append(text)
            return ""
        text, place = self.held + text, 0
        event = self._next(text, place)
        while event.lastgroup in ("opens", "closes"):
            self._cross(event.lastgroup == "opens")
            place = event.end()
            event = self._next(text, place)
        end = event.start()
        self._is_start = self._is_start and not text[place:end].strip()
        self._held, self._holds_call = [text[end:]], event.lastgroup is not None
        return text[:end]

    def finish(self, has_ended: bool = True) -> Said:
        text = self.held
        place = 0
        begin = 0
        left = _MOST_READ
        calls: list[Parsed] = []
        while (event := self._next(text, place)).lastgroup is not None:
            kind, place = event.lastgroup, event.end()
            if kind in ("opens", "closes"):
                if kind == "closes" and not self._is_thinking:
                    calls.clear()
                self._cross(kind == "opens")
                continue
            left -= 1
            here = list[Parsed]([MalformedCall("it is not read")])
            if left >= 0:
                here, place = self._read(kind, text, place)
            begin = begin if calls else event.start()
            calls += here
            self._is_start = False
        is_cut = self._form == "mistral" and not has_ended
        if calls and is_cut and text.rstrip().endswith("[ARGS]"):
            calls[-1] = MalformedCall("the turn was cut ahead of the call's arguments")
        if len(calls) > MOST_CALLS:
            problem = f"a turn has at most {MOST_CALLS} calls; this one has {len(calls)}"
            calls[MOST_CALLS:] = [MalformedCall(problem)]
        return Said(text[:begin] if calls else text, calls)

    def _next(self, text: str, place: int) -> re.Match[str]:
        """The first event from ``place`` on, by the last group: thinking that ``opens`` or
        ``closes``, or the mark of a ``call``, or a ``bare`` one; without a group, the end, with
        what may still become one of them.
        """
        if self._is_thinking:
            match = _INSIDE.search(text, place)
        else:
            bare = self._form == "llama3" and self._is_start
            match = _BARE.match(text, place) if bare else None
            match = match or self._events.search(text, place)
        assert match is not None  # the end of the text fits
        return match

    def _cross(self, opens: bool) -> None:
        self._is_thinking, self._is_start = opens, True

    def _read(self, kind: str, text: str, place: int) -> tuple[list[Parsed], int]:
        if kind == "bare":
            calls, end = _bare_calls(text, place, self._tools)
        elif self._form == "qwen3_coder":
            calls, end = _qwen3_coder(text, place, self._tools)
        else:
            calls, end = _READERS[self._form](text, place)
        while end > place and text[end - 1].isspace():  # which belongs to the next event
            end -= 1
        return calls, end


_TOOL_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
MARKS: Mapping[ToolFormat, str] = {
    "mistral": _TOOL_CALLS,
    "qwen3_coder": _TOOL_CALL,
    "hermes": _TOOL_CALL,
    "llama3": _PYTHON_TAG,
    "harmony": CHANNEL,
}
"""The marks that begin a call in the formats of chat templates; a template has the first format
whose mark it names, but ``qwen3_coder`` and ``harmony`` only where it names ``<function=`` and
<|call|> too.
"""


_OPENS_BEGUN = "|".join(map(begun, (*OPENING_TAGS, HARMONY[0])))
_CLOSES_BEGUN = "|".join(map(begun, (*CLOSING_TAGS, HARMONY[1])))
_INSIDE = re.compile(rf"(?P<closes>{THOUGHT.pattern})|{_CLOSES_BEGUN}|\Z")
_BARE = re.compile(r"\s*+(?:(?P<bare>(?=\{))|\Z)")


@lru_cache(64)
def _events(form: ToolFormat, tools: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the events outside of thinking; white space ahead of a call belongs to it."""
    if form == "plain":
        names = "|".join(map(re.escape, tools)) or r"(?!)"
        mark, partial = rf"\[\s*+(?=(?:{names})\()", r"\[\s*+\w*+\Z"
    else:
        mark, partial = re.escape(MARKS[form]), begun(MARKS[form])
    return re.compile(
        rf"(?<!\s)\s*+(?:(?P<call>{mark})|{partial}|\Z)"
        rf"|(?P<opens>{THINK.pattern})|(?P<closes>{THOUGHT.pattern})"
        rf"|{_OPENS_BEGUN}|{_CLOSES_BEGUN}"
    )


_QUOTES = ("`", "'", '"')
"""Characters that close behind a mark which is only named, as in "write `<tool_call>`"."""


def _hermes(text: str, place: int) -> tuple[list[Parsed], int]:
    """The call behind a mark, and where it ends; a mark that only is a word of a sentence begins
    none.
    """
    begin = _skip(text, place, "")
    if _is_a_word(text, place, "{"):
        return [], place
    value, problem, end = json_at(text, begin)
    if problem:
        return [MalformedCall(problem)], place
    return _ended([call_of(value)], "the JSON object", text, end)


def _is_a_word(text: str, place: int, begins: str) -> bool:
    """Whether Hermes' mark in front of ``place`` only is a word of a sentence: what calls begin
    with does not follow, nor does an end of a call.
    """
    begin = _skip(text, place, "")
    if text.startswith(_QUOTES, place):
        return True
    if begin == len(text) or text.startswith(begins, begin):
        return False
    until = text.find(_TOOL_CALL, begin)
    return text.find(_END_OF_CALL, begin, until if until >= 0 else len(text)) < 0


def _ended(calls: list[Parsed], what: str, text: str, end: int) -> tuple[list[Parsed], int]:
    """The calls if an end of a call, another one or nothing follows, and where that ends."""
    behind = _skip(text, end, "")
    if text.startswith(_END_OF_CALL, behind):
        return calls, behind + len(_END_OF_CALL)
    if behind == len(text) or text.startswith(_TOOL_CALL, behind):
        return calls, behind
    shown = text[end : end + 20].partition(_END_OF_CALL)[0]
    return [*calls[:-1], MalformedCall(f"there is text behind {what}: {shown!r}")], end


_FUNCTION = re.compile(r"\s*+<function=\s*+([^<>\s]++)\s*+>")
_END_OF_FUNCTION = re.compile(r"\s*+</function>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>]++)>\n?")
_END_OF_VALUE = re.compile(
    r"\n?</parameter>(?=\s*+(?:<parameter=|</function>))"
    r"|(?P<next>(?:</function>\s*+)?</tool_call>\s*+<tool_call>\s*+<function=)"
)
"""The end of a value, or what shows that it was forgotten: another call."""


def _qwen3_coder(
    text: str, place: int, tools: Mapping[str, Parameters]
) -> tuple[list[Parsed], int]:
    """The calls between Hermes' mark and its end, perhaps several, or one in JSON as Hermes has
    it.
    """
    if text.startswith("{", _skip(text, place, "")):
        return _hermes(text, place)
    if _is_a_word(text, place, "<function="):
        return [], place
    calls: list[Parsed] = []
    while named := _FUNCTION.match(text, place):
        call, place = _tagged_call(named[1], tools.get(named[1], {}), text, named.end())
        calls.append(call)
        if isinstance(call, MalformedCall):
            return calls, place
    if not calls:
        problem = f"a call begins with <function=name>, found {shown_at(text, place)}"
        return [MalformedCall(problem)], place
    return _ended(calls, "</function>", text, place)


def _tagged_call(name: str, parameters: Parameters, text: str, place: int) -> tuple[Parsed, int]:
    """The call whose first parameter may begin at ``place``, and where it ends."""
    arguments: dict[str, Any] = {}
    wrong = ""
    while begun := _PARAMETER.match(text, place):
        key, place = begun[1].strip(), begun.end()
        has_end = text.find("</parameter>", place) >= 0  # which is found sooner than a pattern
        ended = _END_OF_VALUE.search(text, place) if has_end else None
        if ended is None or ended["next"]:
            return MalformedCall(f"parameter {key}: it does not end in </parameter>"), place
        arguments[key], problem = typed(text[place : ended.start()], parameters.get(key))
        place = ended.end()
        wrong = wrong or (problem and f"parameter {key}: {problem}")
    ended = _END_OF_FUNCTION.match(text, place)
    if ended is None:
        return MalformedCall(f"a call ends in </function>, found {shown_at(text, place)}"), place
    return (MalformedCall(wrong) if wrong else ToolCall(name, arguments)), ended.end()


def _llama3(text: str, place: int) -> tuple[list[Parsed], int]:
    return _in_a_row(text, _skip(text, place, ""))


_BARE_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"\s*:'
)
_ARGUMENTS = {"parameters", "arguments"}
_KEYS = _ARGUMENTS | {"name", "type", "id"}
"""The keys of a call; an object with other keys is something else, such as the schema of a tool."""


def _bare_calls(text: str, place: int, tools: Collection[str]) -> tuple[list[Parsed], int]:
    """The calls of a turn that is calls and nothing else, without a mark; none of an answer that
    happens to begin with a JSON object.
    """
    value, problem, end = json_at(text, place)
    if problem:
        named = _BARE_CALL.match(text, place)
        is_call = named is not None and named[1] in tools
        return ([MalformedCall(problem)] if is_call else []), place + 1
    value = function_of(value)
    if not isinstance(value, Mapping) or not (_ARGUMENTS & value.keys() and value.keys() <= _KEYS):
        return [], end
    if not isinstance(name := value.get("name"), str) or name not in tools:
        return [], end
    calls, behind = _in_a_row(text, place)
    is_answer = behind < len(text) and text[behind] != "{"
    return ([], end) if is_answer else (calls, behind)


_NAMED = re.compile(
    r"([\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:(?P<marked>\[ARGS\]\s*+)|(?=\{))"
)


def _mistral(text: str, place: int) -> tuple[list[Parsed], int]:
    place = _skip(text, place, "")
    if named := _NAMED.match(text, place):
        end = named.end()
        if end == len(text) or text.startswith(_TOOL_CALLS, end):
            return [ToolCall(named[1], {})], end
        arguments, problem, end = json_at(text, end)
        return [MalformedCall(problem) if problem else named_call(named[1], arguments)], end
    if text.startswith("[", place):
        values, problem, end = json_at(text, place)
        return ([MalformedCall(problem)] if problem else [*map(call_of, values)]), end
    return _in_a_row(text, place)


_NAME = re.compile(r"([A-Za-z_]\w*+)\(\s*+")
_KEY = re.compile(r"([A-Za-z_]\w*+)\s*+=\s*+")


def _plain(text: str, place: int) -> tuple[list[Parsed], int]:
    """The calls between brackets."""
    calls: list[Parsed] = []
    while named := _NAME.match(text, place):
        call, place = _plain_call(named[1], text, named.end())
        calls.append(call)
        if isinstance(call, MalformedCall):
            return calls, place
        place = _skip(text, place, ",")
    if text.startswith("]", place):
        return calls, place + 1
    return [
        *calls[:-1],
        MalformedCall(f"a call ends with ')]', found {shown_at(text, place)}"),
    ], place


def _plain_call(name: str, text: str, place: int) -> tuple[Parsed, int]:
    """The call whose arguments begin at ``place``, and where it ends."""
    positional: list[Any] = []
    arguments: dict[str, Any] = {}
    while not text.startswith(")", place):
        key = _KEY.match(text, place)
        value, problem, place = json_at(text, key.end() if key else place)
        if problem:
            return MalformedCall(
                f"argument {len(positional) + len(arguments) + 1}: {problem}"
            ), place
        if key:
            arguments[key[1]] = value
        else:
            positional.append(value)
        place = _skip(text, place, "")
        if not text.startswith((",", ")"), place):
            expected = f"',' or ')' behind an argument, found {shown_at(text, place)}"
            return MalformedCall(f"expected {expected}"), place
        place = _skip(text, place, ",")
    return ToolCall(name, arguments, tuple(positional)), place + 1


_READERS: Mapping[ToolFormat, Callable[[str, int], tuple[list[Parsed], int]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "plain": _plain,
}
"""The calls behind a mark, and where they end."""


def _in_a_row(text: str, place: int) -> tuple[list[Parsed], int]:
    """JSON objects one behind the other, with commas or semicolons between them, and where they
    end.
    """
    calls: list[Parsed] = []
    is_expected = True
    while place < len(text) and (is_expected or text[place] == "{"):
        value, problem, end = json_at(text, place)
        if problem:
            return [*calls, MalformedCall(problem)], place
        calls.append(call_of(value))
        place = _skip(text, end, ",;")
        is_expected = any(sign in ",;" for sign in text[end:place])
    return calls or [MalformedCall("a call is missing behind the token that begins it")], place


def _skip(text: str, place: int, separators: str) -> int:
    """The index behind white space that may hold one of ``separators``."""
    pattern = rf"\s*+[{separators}]?\s*+" if separators else r"\s*+"
    match = re.compile(pattern).match(text, place)
    return match.end() if match else place


_TAGGED = "<function="
_UNREAD = "<arg_key>"
"""A mark that begins arguments inside of Hermes' tag in GLM's format."""


def tool_format(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> ToolFormat:
    """The format of the chat template, which is ``plain`` where there is none or it has no tools.

    Raises ConfigError where the template writes calls in another format.
    """
    templates: Any = tokenizer.chat_template if chat.chat else None
    named = isinstance(templates, dict)
    template = "\n".join(templates.values()) if named else str(templates or "")
    known: list[ToolFormat] = [form for form, mark in MARKS.items() if mark in template]
    if "qwen3_coder" in known and _TAGGED not in template:
        known.remove("qwen3_coder")
    if "harmony" in known and not writes_harmony(tokenizer):
        known.remove("harmony")
    if '"parameters": ' in template:
        known.append("llama3")
    if _UNREAD in template:
        known.clear()
    if not known and template and mentions(tokenizer, "tools"):
        raise ConfigError(
            "the chat template writes calls of tools in a format that Isobit does not read (it "
            "reads those of Hermes, Qwen, Llama 3, Mistral and gpt-oss); set environment.format = "
            '"plain" and describe the tools in the prompts, or take another model'
        )
    return known[0] if known else "plain"
