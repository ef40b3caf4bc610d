"""Calls of tools in each format, whatever a model writes; and templates that can be continued."""

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.data import ChatConfig, ToolFormat
from isobit.data.tokenizer import special_token_ids
from isobit.data.tool_calls import (
    MOST_CALLS,
    Continuation,
    MalformedCall,
    Parsed,
    ToolCall,
    parse_tool_calls,
    tool_format,
)
from isobit.util.errors import ConfigError
from tests.data.test_chat_templates import FAMILIES, tokenizer_of

FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "plain")
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("{", "}", "[", "]", "(", ")", ",", ":", ";", "=", '"', "\\", "\n", " ", "add", "[add("),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": "{}"}', "null"),
    *("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 1500, '{"a":' * 1200, "\ud800", "\0", "é"),
]
"""What formats are made of, and what readers of JSON stumble over."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=3)


def written(calls: list[tuple[str, dict[str, Any]]], form: ToolFormat) -> str:
    """Calls as a model of the format writes them."""
    objects = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3":
            return "; ".join(one.replace('"arguments"', '"parameters"', 1) for one in objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "plain":
            inside = [
                f"{name}({', '.join(f'{key}={json.dumps(one)}' for key, one in given.items())})"
                for name, given in calls
            ]
            return f"[{', '.join(inside)}]"


@pytest.mark.parametrize("form", FORMATS)
@given(text=st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_nothing_that_a_model_writes_raises(form: ToolFormat, text: str) -> None:
    found = parse_tool_calls(text, form)
    assert len(found) <= MOST_CALLS + 1
    for one in found:
        if isinstance(one, MalformedCall):
            assert one.problem
        else:
            assert one.name
            json.dumps([one.arguments, one.positional], allow_nan=False)


@pytest.mark.parametrize("form", FORMATS)
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=MOST_CALLS))
def test_calls_are_read_as_they_were_meant(
    form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert parse_tool_calls(written(calls, form), form) == [
        ToolCall(name, arguments) for name, arguments in calls
    ]


ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "Let me see. <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}", [ADD]),
        ("hermes", 'I add: {"name": "add", "arguments": {"a": 1}}', []),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
         [ADD]),
        ("llama3", '{"answer": 3}', []),
        ("llama3", "The sum is {1, 2}.", []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', [ADD, ADD]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', [ADD]),
        ("plain", "so [add(a=1)] and [add( 1 , 2 ), add()]",
         [ADD, ToolCall("add", {}, (1, 2)), ToolCall("add", {})]),
        ("plain", "in [0, 1] or [a] or f(2)", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ADD]),
    ],
)  # fmt: skip
def test_other_spellings(form: ToolFormat, text: str, expected: list[Parsed]) -> None:
    assert parse_tool_calls(text, form) == expected


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "invalid JSON: Expecting property"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "add"} x</tool_call>', "text behind the JSON object: ' x'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are a JSON object"),
        ("hermes", "<tool_call>", "invalid JSON"),
        ("llama3", '{"name": "add", "parameters": {"a": NaN}}', "NaN is no number of JSON"),
        ("llama3", "<|python_tag|>add(1)", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]", "a call is missing"),
        ("mistral", '[TOOL_CALLS][{"name": 3, "arguments": {}}]', "name of a call is a text"),
        ("plain", "[add(37*48)]", "expected ',' or ')' behind an argument, found '*48)]'"),
        ("plain", "[add(x)]", "argument 1: invalid JSON"),
        ("plain", "[add(1)", "a call ends with ')]', found the end"),
    ],
)
def test_what_cannot_be_read_says_why(form: ToolFormat, text: str, problem: str) -> None:
    (found,) = parse_tool_calls(text, form)
    assert isinstance(found, MalformedCall)
    assert problem in found.problem


def test_a_turn_with_too_many_calls_is_answered_up_to_the_limit() -> None:
    *kept, last = parse_tool_calls(written([("add", {})] * 40, "hermes"), "hermes")
    assert kept == [ToolCall("add", {})] * MOST_CALLS
    assert isinstance(last, MalformedCall)
    assert "this one has 40" in last.problem


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    *("<|end|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end a turn in one family or another."""
FORMAT_OF: dict[str, ToolFormat] = {
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama3"),
    **dict.fromkeys(("mistral_nemo", "mistral_small"), "mistral"),
    **dict.fromkeys(("qwen2_5", "qwen3"), "hermes"),
}
REFUSED = {"deepseek_r1_distill", "gpt_oss"}


def continuation(family: str, **variables: Any) -> Continuation:
    tokenizer = tokenizer_of(family)
    chat = ChatConfig(date=datetime(2025, 3, 7), chat_template_kwargs=variables)
    stops = [tokenizer.get_vocab()[end] for end in ENDS if end in tokenizer.get_vocab()]
    return Continuation(tokenizer, chat, tool_format(tokenizer, chat), TOOLS, stops)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED])
def test_a_turn_goes_on_as_the_template_writes_it(family: str) -> None:
    tokenizer, made = tokenizer_of(family), continuation(family)
    form = FORMAT_OF.get(family, "plain")
    assert tool_format(tokenizer, ChatConfig()) == form
    stop = next(one for one in ENDS if one in tokenizer.get_vocab())
    ended = tokenizer.get_vocab()[stop]
    ids = made.token_ids(["11", "12"], ended)
    assert "11" in tokenizer.decode(ids)
    assert "12" in tokenizer.decode(ids)
    behind_a_stop_string = made.token_ids(["11", "12"], None)
    assert behind_a_stop_string[-len(ids) :] == ids
    assert len(behind_a_stop_string) == len(ids) + 1


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED])
def test_a_result_cannot_spell_a_control_token(family: str) -> None:
    tokenizer, made = tokenizer_of(family), continuation(family)
    ended = next(tokenizer.get_vocab()[one] for one in ENDS if one in tokenizer.get_vocab())
    special = special_token_ids(tokenizer)
    spelt = "".join(tokenizer.convert_ids_to_tokens(sorted(special)))
    harmless, hostile = made.token_ids(["x"], ended), made.token_ids([spelt], ended)
    assert [one for one in hostile if one in special] == [one for one in harmless if one in special]


def test_a_template_that_removes_thoughts_is_refused_with_what_differs() -> None:
    with pytest.raises(ConfigError, match=r"cannot be continued: .*<think>.* became"):
        continuation("deepseek_r1_distill")
    with pytest.raises(ConfigError, match="cannot be continued: it writes an answer behind"):
        continuation("qwen3", enable_thinking=False)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_turn_goes_on_with_what_the_user_says(family: str) -> None:
    tokenizer = tokenizer_of(family)
    stops = [tokenizer.get_vocab()[end] for end in ENDS if end in tokenizer.get_vocab()]
    chat = ChatConfig(date=datetime(2025, 3, 7))
    if family in {*REFUSED, "qwen3"}:  # which removes the thoughts of a turn that the user answers
        with pytest.raises(ConfigError, match=r"cannot be continued|ends an answer with none"):
            Continuation(tokenizer, chat, "plain", [], stops, ["user"])
        return
    made = Continuation(tokenizer, chat, "plain", [], stops, [])
    messages = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "3"}]
    more = [*messages, {"role": "user", "content": "No."}]
    whole = str(tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True))
    assert whole.endswith(str(tokenizer.decode(made.token_ids([], stops[0], ["No."]))))
    spelt = "".join(tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer))))
    special = special_token_ids(tokenizer)
    found = [made.token_ids([], stops[0], [text]) for text in ("No.", spelt)]
    assert len({tuple(one for one in ids if one in special) for ids in found}) == 1


def test_a_template_with_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="calls of tools in a format that Isobit does not read"):
        tool_format(tokenizer_of("gpt_oss"), ChatConfig())


def test_a_template_that_counts_turns_is_refused() -> None:
    tokenizer = tokenizer_of("smollm2")
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = template.replace(
        "message['content']", "loop.length ~ message['content']"
    )
    try:
        with pytest.raises(ConfigError, match="cannot be continued"):
            continuation("smollm2")
    finally:
        tokenizer.chat_template = template
