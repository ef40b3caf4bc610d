"""What people write and read: prompts, how they are answered, the answers with their rewards, and
why some of these teach nothing.

Imports no torch: rewards and data import nothing else of the records.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np

from isobit.records.sequence import TokenSequence
from isobit.util.errors import DataError

FinishReason = Literal["stop", "length", "aborted", "turns", "time", "failed"]
"""The last three end episodes (``isobit.rollout.episodes``)."""
CUT: tuple[FinishReason, ...] = ("length", "turns", "time", "failed")
"""What ends a completion before its model has ended it."""


THINK = re.compile(r"<think(?:ing)?>|\[THINK\]")
THOUGHT = re.compile(r"</think(?:ing)?>|\[/THINK\]")
"""Where a model's thinking begins and ends, which is neither graded nor searched for calls."""


def ends_in_thinking(prompt: str) -> bool:
    """Whether the chat template has begun the thinking at the end of the prompt."""
    last = prompt[-20:].rstrip()
    return any(one.end() == len(last) for one in THINK.finditer(last))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered and tokenised.

    ``id`` is stable across runs (dataset name and row): sampling noise is keyed by it.  ``row``
    holds the columns of the dataset that a reward function may read.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    content: str | Sequence[Mapping[str, Any]] | None = None
    """As the dataset has it, before the chat template: text, or chat messages; None where it comes
    from no dataset.
    """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.  ``temperature`` 0 is greedy; 0 for ``top_k`` and ``min_p`` and 1 for
    ``top_p`` switch a filter off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    special_tokens: bool = False
    """Whether texts show special tokens."""

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the recorded log-probability: greedy decoding records it at 1."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution is narrower than the full softmax."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    ``text`` is without the stop token that may have ended the answer, and is cut before a stop
    string.  An aborted answer ends anywhere, and may be empty.
    """

    sequence: TokenSequence
    text: str
    finish_reason: FinishReason
    episode: "Episode | None" = None
    """With an environment: what happened between the turns, of which ``text`` is the last."""
    stop_string: str = ""
    """The stop string that ended the answer, where one did."""

    @property
    def whole_text(self) -> str:
        """``text`` with the stop string that it is cut before: all that the model wrote."""
        return self.text + self.stop_string

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it, or a failure of its environment (``algorithm.truncated``)."""
        return self.finish_reason in CUT

    @property
    def length(self) -> int:
        """Tokens drawn."""
        return self.sequence.response_length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens drawn, with the stop token if one ended the answer."""
        return self._drawn(self.sequence.token_ids)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        return self._drawn(self.sequence.log_probs)

    @property
    def truncated_log_probs(self) -> tuple[float, ...] | None:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        column = self.sequence.truncated_log_probs
        return None if column is None else self._drawn(column)

    @property
    def routings(self) -> tuple[int, ...] | None:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        column = self.sequence.routings
        return None if column is None else self._drawn(column)

    @property
    def weights_versions(self) -> tuple[int, ...]:
        """One for each of ``token_ids``: the weights that it was drawn from."""
        return self._drawn(self.sequence.weights_versions)

    def _drawn(self, column: np.ndarray) -> tuple:
        """Python's own numbers, as who writes a reward expects them."""
        return tuple(self.sequence.of_response(column).tolist())


@dataclass(frozen=True, slots=True)
class Episode:
    """A completion of several turns, in which a model has called tools."""

    turns: tuple[str, ...]
    """What the model wrote, with special tokens and stop strings, but for the tokens that ended a
    turn.
    """
    results: tuple[tuple[tuple[str, str], ...], ...]
    """Behind each turn, for each call its kind (``ResultKind``) and what the model was told."""
    failure: str = ""
    """The kind of the environment's failure, where there was one."""
    reward: float | None = None
    """By the environment's own ``get_reward``; those of turns are in the sequence."""
    prompt: str = ""
    """As it was rendered, where the environment has said something for it."""

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> "Episode | None":
        """Undo ``dataclasses.asdict`` and JSON, which turns tuples into lists."""
        if content is None:
            return None
        results = tuple(
            tuple((kind, text) for kind, text in behind) for behind in content["results"]
        )
        return cls(
            tuple(content["turns"]),
            results,
            content["failure"],
            content["reward"],
            content["prompt"],
        )

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns and the results as messages."""
        found: list[dict[str, str]] = []
        for place, turn in enumerate(self.turns):
            found.append({"role": "assistant", "content": turn})
            behind = self.results[place] if place < len(self.results) else ()
            roles = {"user": "user"}  # all other kinds are of tools
            found += [{"role": roles.get(kind, "tool"), "content": text} for kind, text in behind]
        return found


@dataclass(slots=True)
class Group:
    """The completions of one visit of one prompt, and their rewards.  A reward of None is excluded
    from the group.
    """

    prompt: Prompt
    visit: int
    completions: list[Completion]
    rewards: list[float | None] = field(default_factory=list)
    reward_parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Each of several rewards by name, before its weight; empty where there is one reward."""
    baseline: float | None = None
    """The reward of the prompt's greedy completion, where the algorithm asks for one."""
    baseline_length: int = 0
    """Tokens of that completion."""
    advantages: list[float | None] = field(default_factory=list)
    """The mean over each completion's tokens, once a step has judged the group; None for one that
    is not learnt from.
    """


REASONS_WITHOUT_SIGNAL: Mapping[str, tuple[str, str]] = {
    "failed": ("without a valid reward", "the first error of the reward is noted above"),
    "excluded": (
        'cut off by the length limit (algorithm.truncated = "exclude")',
        "raise rollout.max_new_tokens",
    ),
    "masked": (
        'cut off by the length limit (algorithm.truncated = "mask")',
        "raise rollout.max_new_tokens",
    ),
    "empty": ("empty", "see completions.jsonl, and which tokens end a completion"),
    "alone": (
        "with the only valid reward of their prompt, where it takes two",
        "see why the other rewards are missing",
    ),
    "no_baseline": (
        "of prompts whose greedy completion has no valid reward",
        "see why that reward is missing",
    ),
    "left_out": ("left out by the algorithm", "see its method credit"),
    "rejected": ("given the weight 0 by corrections", "widen their bounds"),
    "zero": (
        "with reward 0, as all others of their prompt",
        "see whether the reward reads the answers (completions.jsonl); if it does, the model never "
        "gets one right: fine-tune it first (docs/tutorial.md)",
    ),
    "cancelled": (
        "with the same total reward as all others of their prompt, though its parts differ",
        "see reward.parts.NAME.weight",
    ),
    "level": (
        "with the same reward as all others of their prompt: rewards are equal",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "as_greedy": (
        "with the reward of their prompt's greedy completion",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "no_advantage": ("with an advantage of 0", "see their rewards in completions.jsonl"),
}
"""Why a completion taught nothing, by name: the rest of a sentence, and what to do."""


def describe_reasons(counts: Mapping[str, float], advise: bool = False) -> str:
    """Why completions, counted by the names of ``REASONS_WITHOUT_SIGNAL``, gave no signal; with
    ``advise`` also what to do about most of them.
    """
    found = [(name, counts[name]) for name in REASONS_WITHOUT_SIGNAL if counts.get(name)]
    total = sum(count for _, count in found)
    if not found:
        return "no completions"
    parts = [f"{count:,.0f} {REASONS_WITHOUT_SIGNAL[name][0]}" for name, count in found]
    if len(found) == 1:
        text = f"{total:,.0f} completions, all {REASONS_WITHOUT_SIGNAL[found[0][0]][0]}"
    else:
        text = f"{total:,.0f} completions, {', '.join(parts[:-1])} and {parts[-1]}"
    most = max(found, key=lambda pair: pair[1])[0]
    return f"{text}; {REASONS_WITHOUT_SIGNAL[most][1]}" if advise else text


# Chat messages, and what datasets write them as.

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
        return tuple(message_of(one, f"{place}, message {n}") for n, one in enumerate(value, 1))
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
    return left == 0 or any(_is_deep(one, left - 1) for one in parts)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _listed(value: Any) -> Any:
    """The lists in arrays, as which pandas reads those of Parquet, at any depth."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _listed(one) for name, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, list | tuple) else value


_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def _from_sharegpt(value: Any) -> Any:
    """Messages of the form ``{"from": "human", "value": ".."}`` in the usual one, with other keys
    as they are.
    """
    if not isinstance(value, list) or not value:
        return value
    roles = {**_SHAREGPT, "system": "system"}
    if not all(isinstance(one, Mapping) and one.keys() >= {"from", "value"} for one in value):
        return value
    if not all(one["from"] in roles and not {"role", "content"} & one.keys() for one in value):
        return value
    names = {"from": "role", "value": "content"}
    plain = ({**one, "from": roles[one["from"]]} for one in value)
    return [{names.get(key, key): content for key, content in one.items()} for one in plain]


_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{.*["']role["']\s*:""", re.DOTALL)


def written_messages(text: str) -> str | list[Any]:
    """The conversation that ``text`` writes down, as JSON or as Python writes a list, which is how
    it is found in CSV files; the text itself if it is no conversation.
    """
    if not _LIKE_MESSAGES.match(text) or not text.rstrip().endswith("]"):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and found and all(map(_has_role, found)):
            return found
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
    given = function.get("arguments", function.get("parameters"))
    read = (_from_json(given) if given.strip() else None) if isinstance(given, str) else given
    if read is not None and not isinstance(read, Mapping):
        raise DataError(
            f"{place}: the arguments of {name!r} are a table or its JSON text, found "
            f"{_shown(given)}"
        )
    made = {**function, "arguments": {} if read is None else given}
    return {**call, "function": made} if is_wrapped else made


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
    found = _listed(_from_json(value))
    if found is None or found in ([], ""):
        return None
    if isinstance(found, list):
        found = [_from_json(one) for one in found]
        if all(isinstance(one, Mapping) for one in found):
            return tuple(found)
    raise DataError(
        f"{place}: expected tools for the chat template, a list of JSON schemas or its JSON text, "
        f"found {_shown(value)}; if that column is for the reward alone, set `tools` of this data "
        "set to '' or to another column"
    )


def _from_json(value: Any) -> Any:
    """What JSON text says; anything else as it is, also text that is nested too deeply."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return value if _is_deep(found) else found


def read_variables(value: Any, place: str) -> Mapping[str, Any]:
    """Variables of the chat template: a table, or its JSON text."""
    check_depth(value, place)
    found = _from_json(value)
    if found is None or found == "":
        return {}
    if not isinstance(found, Mapping):
        raise DataError(
            f"{place}, column {VARIABLES_COLUMN!r}: expected a table of variables of the chat "
            f"template or its JSON text, found {_shown(value)}"
        )
    return dict(found)


def other_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same messages with calls of tools in other forms: half of the templates want the
    arguments as a table and half as JSON text, and some want content where there is none.
    """
    filled = [{"content": "", **message} for message in messages]
    for some in (messages, filled):
        for change in (lambda one: one, _read, _write):
            other = [_with_arguments(message, change) for message in some]
            if other != list(messages):
                yield other


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    found = [call for call in calls if isinstance(call, Mapping)] if _is_list(calls) else []
    return [one if isinstance(one := call.get("function"), Mapping) else call for call in found]


def _is_list(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def written_arguments(message: Message) -> list[str]:
    """The arguments of a message's calls of tools that are JSON text."""
    found = [call.get("arguments") for call in calls_of(message)]
    return [one for one in found if isinstance(one, str) and isinstance(_read(one), Mapping)]


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _write(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def quotes(text: str, arguments: str) -> bool:
    """Whether a template that expects a table has written JSON text as a text in quotes."""
    quoted = (json.dumps(arguments, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    return arguments not in text and any(one in text for one in quoted)


def with_read_arguments(message: Message) -> Message:
    """The message with arguments in JSON text as tables."""
    return _with_arguments(message, _read)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with other arguments of its calls of tools."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        made = {name: changed(one) if name == "function" else one for name, one in call.items()}
        return {**made, "arguments": change(made["arguments"])} if "arguments" in made else made

    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [changed(call) for call in calls]} if _is_list(calls) else message
    )
