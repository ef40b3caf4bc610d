"""Calls of tools in what a model writes, and how a conversation goes on with their results.

    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes and Qwen
    llama3     {"name": "add", "parameters": {"a": 1}}                           Llama 3
    mistral    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]              Mistral
               [TOOL_CALLS]add[ARGS]{"a": 1}                                     its later models
    plain      [add(1, b=2)]                                                     any model

The first three are written by chat templates, which say what a model was trained with; ``plain``
is for tokenizers without a template, or with one that knows no tools.  Values are JSON in all of
them.  A turn may hold several calls.  Text is untrusted: parsing never raises, and a call that
cannot be read becomes a ``MalformedCall``, whose problem is told to the model.

A conversation goes on in tokens.  What the model drew stays as it was drawn, up to the token that
ended its turn; behind it stand the tokens of what the template writes for the results, up to the
point where the model draws again.  That is the conversation which the template would render only
if it continues what it has rendered before.  So the ``Continuation`` of a tokenizer renders a short
conversation with and without the next turn, once, and refuses a template that rewrites the past,
such as one that removes thoughts of earlier turns.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig, ToolFormat
from isobit.data.prompts import prompts_of_rows
from isobit.data.sources import row_of
from isobit.data.tokenizer import mentions, quoted, quoted_values, rendered, token_ids, unmarked
from isobit.records.text import VARIABLES_COLUMN, Message, Messages, Prompt, as_messages
from isobit.util.errors import ConfigError, DataError

MOST_CALLS = 16
"""Calls in a turn; those beyond are answered with an error."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    """By name."""
    positional: tuple[Any, ...] = ()
    """Those without a name, which only ``plain`` has."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    problem: str
    """For the model: what is wrong, and what is expected."""


Parsed = ToolCall | MalformedCall


def parse_tool_calls(text: str, form: ToolFormat) -> list[Parsed]:
    """The calls in one turn of a model, in their order; none where it calls no tool.

    ``text`` is the turn with its special tokens, but for the one that ended it.
    """
    found = _PARSERS[form](text)
    if len(found) > MOST_CALLS:
        extra = MalformedCall(f"a turn has at most {MOST_CALLS} calls; this one has {len(found)}")
        found = [*found[:MOST_CALLS], extra]
    return found


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _hermes(text: str) -> list[Parsed]:
    return [_read_call(body) for body in _HERMES.findall(text)]


_PYTHON_TAG = "<|python_tag|>"


def _llama3(text: str) -> list[Parsed]:
    """A turn that is calls and nothing else; any other JSON object is an answer."""
    _, tag, body = text.rpartition(_PYTHON_TAG)
    body = body.strip()
    if not tag and not re.match(r'\{\s*"(name|type|function|parameters)"\s*:', body):
        return []
    return _in_a_row(body)


def _mistral(text: str) -> list[Parsed]:
    _, *parts = text.split("[TOOL_CALLS]")
    found: list[Parsed] = []
    for part in parts:
        body = part.strip()
        named = re.match(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)", body)
        if named:
            arguments, problem, _ = _json_at(body, named.end())
            found.append(MalformedCall(problem) if problem else _call(named[1], arguments))
        elif body.startswith("["):
            value, problem, _ = _json_at(body, 0)
            values = value if isinstance(value, list) else [value]
            found += [MalformedCall(problem)] if problem else map(_call_of, values)
        else:
            found += _in_a_row(body)
    return found


_OPENS = re.compile(r"\[\s*(?=[A-Za-z_]\w*\()")
_NAME = re.compile(r"([A-Za-z_]\w*)\(\s*")
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")


def _plain(text: str) -> list[Parsed]:
    found: list[Parsed] = []
    place = 0
    while opened := _OPENS.search(text, place):
        place = opened.end()
        while named := _NAME.match(text, place):
            call, place = _plain_call(named[1], text, named.end())
            found.append(call)
            if isinstance(call, MalformedCall):
                break
            place = _skip(text, place, ",")
        else:
            closed = re.compile(r"\s*\]").match(text, place)
            if not closed:
                found[-1] = MalformedCall(f"a call ends with ')]', found {_shown(text, place)}")
            place = closed.end() if closed else place
    return found


def _plain_call(name: str, text: str, place: int) -> tuple[Parsed, int]:
    """The call whose arguments begin at ``place``, and where it ends."""
    positional: list[Any] = []
    arguments: dict[str, Any] = {}
    while not text.startswith(")", place):
        key = _KEY.match(text, place)
        value, problem, place = _json_at(text, key.end() if key else place)
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
            expected = f"',' or ')' behind an argument, found {_shown(text, place)}"
            return MalformedCall(f"expected {expected}"), place
        place = _skip(text, place, ",")
    return ToolCall(name, arguments, tuple(positional)), place + 1


_PARSERS = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral, "plain": _plain}


def _in_a_row(text: str) -> list[Parsed]:
    """JSON objects one behind the other, with commas or semicolons between them."""
    found: list[Parsed] = []
    place = 0
    while place < len(text):
        value, problem, place = _json_at(text, place)
        if problem:
            return [*found, MalformedCall(problem)]
        found.append(_call_of(value))
        place = _skip(text, place, ",;")
    return found or [MalformedCall("a call is missing behind the token that begins it")]


def _skip(text: str, place: int, separators: str) -> int:
    """Behind white space, and one of ``separators`` in it."""
    pattern = rf"\s*[{separators}]?\s*" if separators else r"\s*"
    found = re.compile(pattern).match(text, place)
    return found.end() if found else place


def _read_call(text: str) -> Parsed:
    value, problem, end = _json_at(text.strip(), 0)
    if not problem and end < len(text.strip()):
        problem = f"there is text behind the JSON object: {_shown(text.strip(), end)}"
    return MalformedCall(problem) if problem else _call_of(value)


def _call_of(value: Any) -> Parsed:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or "name" not in value:
        return MalformedCall('a call is a JSON object with "name" and "arguments"')
    return _call(value["name"], value.get("arguments", value.get("parameters", {})))


def _call(name: Any, arguments: Any) -> Parsed:
    if not isinstance(name, str) or not name:
        return MalformedCall("the name of a call is a text")
    if isinstance(arguments, str):
        arguments, problem, _ = _json_at(arguments, 0)
        if problem:
            return MalformedCall(f"the arguments are a text that is no JSON: {problem}")
    if not isinstance(arguments, Mapping):
        return MalformedCall("the arguments of a call are a JSON object")
    return ToolCall(name, dict(arguments))


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number:.20} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if abs(value) < float("inf") else _refused(number)


_JSON = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def _json_at(text: str, place: int) -> tuple[Any, str, int]:
    """The JSON value that begins at ``place``, what is wrong with it (empty if nothing is), and
    where it ends.
    """
    try:
        value, end = _JSON.raw_decode(text, place)
    except json.JSONDecodeError as error:
        return None, f"invalid JSON: {error.msg} at {_shown(text, error.pos)}", place
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets of that depth
        return None, f"invalid JSON: {str(error)[:80]}", place
    return value, "", end


def _shown(text: str, place: int) -> str:
    return repr(text[place : place + 20]) if place < len(text) else "the end"


def _begun(mark: str) -> str:
    """A pattern for ``mark``, or for its first characters where the text ends with them."""
    pattern = ""
    for character in reversed(mark):
        pattern = re.escape(character) + (rf"(?:{pattern}|\Z)" if pattern else "")
    return pattern


MARKS: Mapping[ToolFormat, str] = {
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3": _PYTHON_TAG,
}
"""What begins a call, in the formats of chat templates; a template has the first one it names."""
_BEGINS = {form: re.compile(rf"(?<!\s)\s*+(?:{_begun(mark)}|\Z)") for form, mark in MARKS.items()}


def calls_begin(text: str, form: ToolFormat, is_start: bool) -> int:
    """Where in ``text`` the first call begins, or may begin once more text follows; the length
    where it cannot. White space ahead of a call belongs to it.

    ``form`` is one of ``MARKS``; ``is_start`` says whether the turn begins with ``text``.
    """
    if form == "llama3" and is_start and re.match(r"\s*(?:\{|\Z)", text):
        return 0
    found = _BEGINS[form].search(text)
    assert found is not None  # the end of the text fits
    return found.start()


def tool_format(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> ToolFormat:
    """The format of the chat template, which is ``plain`` where there is none or it has no tools.

    Raises ConfigError where the template writes calls in another format.
    """
    found: Any = tokenizer.chat_template if chat.chat else None
    template = "\n".join(found.values()) if isinstance(found, dict) else str(found or "")
    known: list[ToolFormat] = [form for form, mark in MARKS.items() if mark in template]
    if '"parameters": ' in template:
        known.append("llama3")
    if not known and template and mentions(tokenizer, "tools"):
        raise ConfigError(
            "the chat template writes calls of tools in a format that Isobit does not read (it "
            'reads Hermes and Qwen, Llama 3 and Mistral); set environment.format = "plain" and '
            "describe the tools in the prompts, or take another model"
        )
    return known[0] if known else "plain"


def messages_of(prompt: Prompt) -> Messages:
    """A prompt as the dataset has it, as messages."""
    content = prompt.text if prompt.content is None else prompt.content
    return as_messages(content if isinstance(content, str) else tuple(content))


Speaker = Literal["tool", "user"]
_SAID = "isobit"
_CALL_ID = "isobit000"
"""Templates of Mistral want nine characters."""


class Continuation:
    """What a tokenizer appends to a turn that called tools, as tokens.

    Raises ConfigError for a template that cannot be continued.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig,
        form: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        stop_token_ids: Sequence[int],
        answered_by: Collection[Speaker] = ("tool",),
    ) -> None:
        """``answered_by``: who will speak behind turns; another is checked when it first does."""
        self._tokenizer, self._chat, self._form, self._tools = tokenizer, chat, form, tools
        self._stops = {one: str(tokenizer.decode([one])) for one in stop_token_ids}
        self._is_templated = chat.chat and bool(tokenizer.chat_template)
        self._checked = set[Speaker]()
        if self._is_templated:
            for speaker in answered_by:
                self._check(speaker)

    def token_ids(
        self, results: Sequence[str], ended: int | None, spoken: Sequence[str] = ()
    ) -> list[int]:
        """The tokens behind a turn that ended with the stop token ``ended`` (None: by a stop
        string), up to where the model draws again.  ``results`` are texts of tools, in the order
        of the calls, and ``spoken`` those of the user behind them; control tokens that they spell
        are ordinary characters.

        Raises ConfigError where the user has spoken first, in a template that cannot continue that.
        """
        if self._is_templated:
            if (speaker := "tool" if results else "user") not in self._checked:
                self._check(speaker)
            said = [*self._results(results), *({"role": "user", "content": one} for one in spoken)]
            _, stop, text = self._next_turn([self._answer(speaker)], said)
        else:
            stop = self._stops[ended] if ended in self._stops else next(iter(self._stops.values()))
            told = "".join([*(f"[{result}]" for result in results), *spoken])
            text = quoted(told, self._tokenizer)
        ids = self._behind(stop, text)
        return ids if ended in self._stops else [*token_ids([stop], self._tokenizer)[0], *ids]

    def opened(self, prompt: Prompt, opening: str | Sequence[Message]) -> Prompt:
        """A prompt with text of its environment behind its last message, as TRL puts it there, or
        with messages in its place.

        Raises ``DataError`` where that message is not the user's, or cannot be rendered.
        """
        place = f"prompt {prompt.id}"
        content = prompt.text if prompt.content is None else prompt.content
        asked: str | list[Message]
        if not isinstance(opening, str):
            asked = list(opening)
        elif isinstance(content, str):
            asked = content + opening
        else:
            *before, last = messages_of(prompt)
            said = last["content"]
            if last["role"] != "user" or not isinstance(said, str):
                raise DataError(
                    f"{place}: the environment has text for the end of the prompt, whose last "
                    f"message is of {last['role']!r}; end it in text of the user"
                )
            asked = [*before, {**last, "content": said + opening}]
        variables, tools = prompt.row.get(VARIABLES_COLUMN), self._tools or None
        row = row_of(asked, prompt.row, place, tools=tools, variables=variables)
        (found,) = prompts_of_rows(prompt.id, [row], self._tokenizer, self._chat)
        return replace(found, id=prompt.id, content=prompt.content)

    def _behind(self, stop: str, text: str) -> list[int]:
        """The tokens of ``text`` behind a stop token, which may decide about its first one."""
        first, both = token_ids([stop, stop + text], self._tokenizer)
        if both[: len(first)] != first:
            raise ConfigError(
                f"the tokenizer reads {stop!r} as other tokens where text follows it, so that a "
                "conversation cannot be continued in tokens"
            )
        return both[len(first) :]

    def _answer(self, speaker: Speaker) -> Message:
        """A turn that ``speaker`` answers, with a thought if the template knows thoughts."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._form == "plain" or speaker == "user":
            message["content"] = _SAID
        else:
            function = {"name": _SAID, "arguments": {}}
            call = {"type": "function", "id": _CALL_ID, "function": function}
            message["tool_calls"] = [call]
        if mentions(self._tokenizer, "reasoning_content"):
            message["reasoning_content"] = _SAID
        elif self._thinks:
            message["content"] = f"<think>\n{_SAID}\n</think>\n\n{message['content']}"
        return message

    @property
    def _thinks(self) -> bool:
        found: Any = self._tokenizer.chat_template
        return "</think>" in ("\n".join(found.values()) if isinstance(found, dict) else str(found))

    def _results(self, results: Sequence[str]) -> list[Message]:
        if self._form == "plain" and results:
            return [{"role": "user", "content": "".join(f"[{result}]" for result in results)}]
        named = {"role": "tool", "name": _SAID, "tool_call_id": _CALL_ID}
        return [{**named, "content": result} for result in results]

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return rendered(
                quoted_values(messages, self._tokenizer),
                self._tokenizer,
                add_generation_prompt,
                quoted_values(self._tools, self._tokenizer) if self._form != "plain" else None,
                quoted_values(self._chat.chat_template_kwargs, self._tokenizer),
                self._chat.date,
            )
        except Exception as error:  # templates raise through jinja2
            raise ConfigError(
                "the chat template refuses a conversation with calls of tools: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _next_turn(
        self, answers: Sequence[Message], said: Sequence[Message]
    ) -> tuple[str, str, str]:
        """The text up to the token that ends the last of ``answers``, that token, and the text
        behind it where messages and the next turn follow; the same messages follow earlier answers.
        """
        messages: list[Message] = [{"role": "user", "content": _SAID}]
        for answer in answers[:-1]:
            messages += [answer, *said]
        ahead = self._text(messages, add_generation_prompt=True)
        messages.append(answers[-1])
        spoken = self._text(messages, add_generation_prompt=False)
        both = self._text([*messages, *said], add_generation_prompt=True)
        if not spoken.startswith(ahead):
            raise _rewrites("an answer behind the generation prompt", ahead, spoken)
        ends = {spoken.rfind(stop, len(ahead)): stop for stop in self._stops.values()}
        place = max(ends)
        if place < 0:
            named = ", ".join(map(repr, self._stops.values()))
            raise ConfigError(
                f"the chat template ends an answer with none of {named}, which end a completion; "
                "name its token in rollout.stop_tokens"
            )
        end = place + len(ends[place])
        if not both.startswith(spoken[:end]):
            what = "tools' results" if said[0]["role"] == "tool" else "user's words"
            raise _rewrites(f"an answer, once the {what} follow,", spoken[:end], both)
        return both[:end], ends[place], both[end:]

    def _check(self, speaker: Speaker) -> None:
        """Refuse a template that does not continue what it has rendered, turn by turn."""
        answer, spoken = self._answer(speaker), [{"role": "user", "content": "1"}]
        said = self._results(["1", "2"]) if speaker == "tool" else spoken
        before, stop, behind = self._next_turn([answer], said)
        _, _, later = self._next_turn([answer, answer], said)
        if later != behind:
            raise _rewrites("a second turn", behind, later)
        whole, begun = token_ids([before + behind, before], self._tokenizer)
        if whole != begun + self._behind(stop, behind):
            raise ConfigError(
                "the tokenizer reads a conversation as other tokens once a turn follows: "
                f"{unmarked(behind)!r:.80} is not tokenised alone as it is in the whole; such a "
                "conversation cannot be continued in tokens"
            )
        self._checked.add(speaker)


def _rewrites(what: str, before: str, after: str) -> ConfigError:
    """What a template writes otherwise, from the first character that differs."""
    before, after = unmarked(before), unmarked(after)
    pairs = enumerate(zip(before, after, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, place - 20)
    return ConfigError(
        f"the chat template cannot be continued: it writes {what} otherwise than before "
        f"({before[start : place + 30]!r} became {after[start : place + 30]!r}), so that an "
        "episode would not be one sequence of tokens; give the model's folder a chat template "
        "that leaves earlier turns as they are, or take another model"
    )
