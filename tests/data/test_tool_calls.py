"""Calls of tools in each format, whatever a model writes, and however it arrives."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isobit.config.environment import ToolFormat
from isobit.data import tool_calls
from isobit.data.call_values import typed
from isobit.data.parsed_calls import (
    MOST_CALLS,
    MalformedCall,
    Parsed,
    Said,
    ToolCall,
)
from isobit.data.tool_calls import Parameters, parameters_of, read_turn, turn_reader
from tests.data.test_chat_templates import tokenizer_of

FORMATS: tuple[ToolFormat, ...] = ("hermes", "qwen3_coder", "llama3", "mistral", "plain")
"""All but ``harmony``, whose thinking has no tags of its own (``test_harmony``)."""
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[add(")
THOUGHTS = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]")),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
TAGS = [tag for both in THOUGHTS for tag in both]
PIECES = [
    *(*MARKS, *TAGS, "[CALL_ID]", "<thi", "</think", "[/TH", "<tool_"),
    *("{", "}", "[", "]", "(", ")", ",", ":", ";", "=", '"', "\\", "\n", " ", "add", "[add("),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": "{}"}', "null"),
    *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "<function", "None"),
    *("\u3000", "\x1c", "\t", "<parameter=a>\n"),
    *("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 1500, '{"a":' * 1200, "\ud800", "\0", "é"),
]
"""What formats are made of, and what readers of JSON stumble over."""
HARMONY = [
    *(
        "<|start|>",
        "assistant",
        "<|channel|>",
        "commentary",
        "analysis",
        " to=functions.add",
        "to=",
    ),
    *(
        "<|constrain|>json",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        " ",
        "\n",
        "<|",
        "<",
    ),
    *('{"a": 1}', "{", '"', "to=functions.add<|message|>", " to=python", "functions.", "functions"),
]
WORDS = st.text(max_size=8) | st.sampled_from([*MARKS, *TAGS, "</tool_call>x", '"}'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | WORDS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(WORDS, below, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
SCHEMA = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
ADDING = parameters_of([SCHEMA])
TYPES = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}
HEADER = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
TEXT = st.text() | st.lists(st.sampled_from([*PIECES, *HARMONY]), max_size=12).map("".join)


def calls_in(text: str, form: ToolFormat, is_thinking: bool = False) -> list[Parsed]:
    return read_turn(text, form, ADDING, is_thinking).calls


def written(calls: list[tuple[str, dict[str, Any]]], form: ToolFormat) -> str:
    """Calls as a model of the format writes them."""
    objects = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "qwen3_coder":
            return "\n".join(map(tagged, calls))
        case "llama3":
            return "; ".join(one.replace('"arguments"', '"parameters"', 1) for one in objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "harmony":
            return "".join(f"{HEADER.format(name)}{json.dumps(given)}" for name, given in calls)
        case "plain":
            inside = [
                f"{name}({', '.join(f'{key}={json.dumps(one)}' for key, one in given.items())})"
                for name, given in calls
            ]
            return f"[{', '.join(inside)}]"


def tagged(call: tuple[str, dict[str, Any]]) -> str:
    """A call as the template of Qwen3-Coder writes it."""
    name, given = call
    texts = {
        key: json.dumps(one) if isinstance(one, dict | list) else str(one)
        for key, one in given.items()
    }
    inside = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in texts.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def schemas_of(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Parameters]:
    """Tools that have these calls; each of a name has the types of its last one."""
    return {
        name: {key: {"type": TYPES.get(type(one), "null")} for key, one in given.items()}
        for name, given in calls
    }


def in_pieces(text: str, sizes: list[int], form: ToolFormat, is_thinking: bool) -> Said:
    """What a reader says of a turn that arrives in pieces."""
    reader, told, place = turn_reader(form, ADDING, is_thinking), "", 0
    for size in [*sizes, len(text)]:
        told += reader.feed(text[place : place + size])
        place += size
    assert text == told + reader.held
    said = reader.finish()
    return Said(told + said.text, said.calls)


@pytest.mark.parametrize("form", [*FORMATS, "harmony"])
@given(text=TEXT, is_thinking=st.booleans(), sizes=st.lists(st.integers(0, 9), max_size=9))
def test_nothing_that_a_model_writes_raises_whole_or_in_pieces(
    form: ToolFormat, text: str, is_thinking: bool, sizes: list[int]
) -> None:
    said = read_turn(text, form, ADDING, is_thinking)
    assert len(said.calls) <= MOST_CALLS + 1
    assert text.startswith(said.text)
    for one in said.calls:
        if isinstance(one, MalformedCall):
            assert one.problem
        else:
            assert one.name
            json.dumps([one.arguments, one.positional], allow_nan=False)
    assert in_pieces(text, sizes, form, is_thinking) == said


@pytest.mark.parametrize("form", FORMATS)
@given(calls=CALLS, thought=st.sampled_from(["", *THOUGHTS]), begun=st.booleans(), inside=TEXT)
def test_calls_are_read_as_they_were_meant_behind_any_thinking(
    form: ToolFormat,
    calls: list[tuple[str, dict[str, Any]]],
    thought: tuple[str, str] | str,
    begun: bool,
    inside: str,
) -> None:
    """Whatever the thinking holds, and whoever has begun it; a draft of a call with a mark of
    thinking in it might be either.
    """
    text, ahead = written(calls, form), ""
    if thought:
        draft = written([("draft", {}), *calls], form)
        assume(not any(tag in draft for tag in TAGS))
        ahead = f"{'' if begun else thought[0]}{inside}\n{draft}{thought[1]}"
    assume(form != "qwen3_coder" or len(calls) == len({name for name, _ in calls}))
    tools = {"draft": {}, **schemas_of(calls)}
    said = read_turn(ahead + text, form, tools, is_thinking=bool(thought) and begun)
    assert said == Said(ahead, [ToolCall(name, arguments) for name, arguments in calls])


@pytest.mark.parametrize("form", FORMATS)
@given(calls=CALLS, inside=TEXT.filter(lambda text: not any(tag in text for tag in TAGS)))
def test_nothing_inside_thinking_is_a_call(
    form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], inside: str
) -> None:
    tools = schemas_of(calls)
    draft = written([(name, {}) for name, _ in calls], form) + inside
    for text, is_thinking in (
        (f"<think>{draft}</think> 4", False),
        (f"{draft}</think> 4", True),
        (f"{draft}</think> 4", False),  # a template has begun it that nobody was told of
        (f"It is <think>{draft}", False),
        (f"[THINK]{draft}", False),
        (draft, True),
    ):
        assert read_turn(text, form, tools, is_thinking) == Said(text, [])


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_5", "qwen3_coder"),
        ("qwen3_coder", "qwen3_coder"),
        ("llama3_1", "llama3"),
        ("mistral_nemo", "mistral"),
        ("mistral_small", "mistral"),
        ("gpt_oss", "harmony"),
    ],
)
def test_what_a_template_writes_is_read_back(family: str, form: ToolFormat) -> None:
    types = {"city": "string", "days": "integer", "exact": "boolean", "places": "array"}
    arguments = {"city": "Zürich </think> <tool_call>", "days": 1, "exact": True, "places": ["a"]}
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "id": "call00001", "function": function}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it?"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokenizer = tokenizer_of(family)
    ahead, whole = (
        str(tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=begins))
        for some, begins in ((asked, True), ([*asked, turn], False))
    )
    text = whole.removeprefix(ahead)
    for end in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|call|>"):
        text = text.partition(end)[0]
    tools = {"weather": {key: {"type": one} for key, one in types.items()}}
    expected = [ToolCall("weather", arguments)]
    assert read_turn(text, form, tools, is_thinking=False).calls == expected


ADD = ToolCall("add", {"a": 1})
NONE = ToolCall("add", {})
WRITTEN = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"Let me see. <tool_call>{WRITTEN}", [ADD]),
        ("hermes", f"I add: {WRITTEN}", []),
        ("hermes", f"<tool_call>{WRITTEN}<tool_call>{WRITTEN}</tool_call>", [ADD, ADD]),
        ("hermes", f"<tool_call>{WRITTEN}</tool_call> <think>And</think> then", [ADD]),
        ("hermes", f"<tool_call>{WRITTEN}</tool_call></think>No.", []),
        ("hermes", "The <tool_call> tag is not needed: 4.", []),
        ("hermes", "Write `<tool_call>` and `</tool_call>`.", []),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
         [ADD]),
        ("llama3", '{"parameters": {"a": 1}, "name": "add"}', [ADD]),
        ("llama3", '{"answer": 3}', []),
        ("llama3", '{"name": "Copper", "mass": 63}', []),
        ("llama3", '{"name": "add", "mass": 63}', []),
        ("llama3", '{"name": "Copper", "parameters": {"mass": 63}}', []),
        ("llama3", '{"name": "add", "description": "Add.", "parameters": {}}', []),
        ("llama3", '{"name": "add", "parameters": {"a": 1}} would be a call.', []),
        ("llama3", '{"name": "Copper", "parameters": {', []),
        ("llama3", "The sum is {1, 2}.", []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', [ADD, ADD]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', [ADD]),
        ("mistral", "[TOOL_CALLS]add[ARGS][TOOL_CALLS]add[ARGS]null", [NONE, NONE]),
        ("plain", "so [add(a=1)] and [add( 1 , 2 ), add()]",
         [ADD, ToolCall("add", {}, (1, 2)), NONE]),
        ("plain", "in [0, 1] or [a] or f(2)", []),
        ("plain", "the matrix [f(2), sin(x)]", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": " {\\"a\\": 1} "}</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null, "parameters": {"a": 1}}', [ADD]),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>", [ADD]),
        ("qwen3_coder", f"<tool_call>{WRITTEN}</tool_call>", [ADD]),
        ("qwen3_coder", "<tool_call><function=add></function> <function=add></function>",
         [NONE, NONE]),
        ("qwen3_coder", "It is `<tool_call>` that begins one", []),
        ("qwen3_coder", "<tool_call><function=sub><parameter=a>1</parameter></function>",
         [ToolCall("sub", {"a": "1"})]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n<tool_call>\n<function=add>\n"
         "</function>\n", [NONE, NONE]),
        ("hermes", f"<tool_call>\n{WRITTEN}\n<tool_call>\n{WRITTEN}\n", [ADD, ADD]),
        ("hermes", f"<tool_call>{WRITTEN}\u3000", [ADD]),
        ("mistral", f"[TOOL_CALLS]{WRITTEN}\n", [ADD]),
        ("llama3", f"{WRITTEN}\n", [ADD]),
        ("llama3", f"{WRITTEN}; \x1c", [ADD]),
        ("plain", "[add(a=1)]\n", [ADD]),
    ],
)  # fmt: skip
def test_other_spellings(form: ToolFormat, text: str, expected: list[Parsed]) -> None:
    assert calls_in(text, form) == expected


@pytest.mark.parametrize("arguments", ['""', '" "', "null", '"null"', "{}", '"{}"', None])
def test_no_arguments_are_written_in_many_ways(arguments: str | None) -> None:
    given = "" if arguments is None else f', "arguments": {arguments}'
    assert calls_in(f'<tool_call>{{"name": "add"{given}}}</tool_call>', "hermes") == [NONE]


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "invalid JSON: Expecting property"),
        ("hermes", "<tool_call>add(1)</tool_call>", "invalid JSON: Expecting value"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "add"} x</tool_call>', "text behind the JSON object: ' x'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{} 1"}</tool_call>', "behind it: ' 1"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}',
         "and not both"),
        ("hermes", "<tool_call>", "invalid JSON"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "begins with <function=name>, found 'add"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1 2</parameter></function>",
         "parameter a: there is text behind its value: ' 2'"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>x</parameter></function>",
         "parameter a: invalid JSON: Expecting value at 'x'"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function>",
         "parameter a: it does not end in </parameter>"),
        ("qwen3_coder", "<tool_call><function=add>1</function>", "a call ends in </function>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n", "it does not end in"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>x</parameter><parameter=b>"
         "<tool_call><function=add></function></tool_call></parameter></function></tool_call>",
         "parameter a: invalid JSON"),
        ("plain", "[add(a=1\n", "expected ',' or ')' behind an argument, found the end"),
        ("plain", "[add(a=1, ", "argument 2: invalid JSON"),
        ("qwen3_coder", "<tool_call><function=add></function> 1", "text behind </function>: ' 1'"),
        ("llama3", '{"name": "add", "parameters": {"a": NaN}}', "NaN is no number of JSON"),
        ("llama3", "<|python_tag|>add(1)", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]", "a call is missing"),
        ("mistral", '[TOOL_CALLS][{"name": 3, "arguments": {}}]', "name of a call is a text"),
        ("plain", "[add(37*48)]", "expected ',' or ')' behind an argument, found '*48)]'"),
        ("plain", "[add(x)]", "argument 1: invalid JSON"),
        ("plain", "[add(1)", "a call ends with ')]', found the end"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_why(form: ToolFormat, text: str, problem: str) -> None:
    (found,) = calls_in(text, form)
    assert isinstance(found, MalformedCall)
    assert problem in found.problem


def test_a_value_that_does_not_end_takes_no_other_call() -> None:
    text = "<tool_call><function=add><parameter=a>1</function></tool_call>" + tagged(
        ("add", {"a": 2})
    )
    broken, right = calls_in(text, "qwen3_coder")
    assert isinstance(broken, MalformedCall) and "it does not end" in broken.problem
    assert right == ToolCall("add", {"a": 2})


def test_a_turn_with_too_many_calls_is_answered_up_to_the_limit() -> None:
    *kept, last = calls_in(written([("add", {})] * 40, "hermes"), "hermes")
    assert kept == [NONE] * MOST_CALLS
    assert isinstance(last, MalformedCall)
    assert "this one has 40" in last.problem


def test_a_turn_of_broken_calls_is_read_in_a_time_that_grows_with_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of JSON counts the lines before it."""
    read, places = tool_calls.json_at, list[int]()

    def counted(text: str, place: int) -> tuple[Any, str, int]:
        places.append(place)
        return read(text, place)

    monkeypatch.setattr(tool_calls, "json_at", counted)
    assert len(calls_in("<tool_call>{" * 10_000, "hermes")) == MOST_CALLS + 1
    assert len(places) < 1000


def test_parameters_are_read_from_either_form_of_a_schema() -> None:
    wrapped = {"type": "function", "function": {"name": "sub", "parameters": []}}
    assert parameters_of([SCHEMA, wrapped]) == {"add": {"a": {"type": "integer"}}, "sub": {}}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "str"}, "1", "1"),
        ({"type": "STRING"}, "Paris", "Paris"),
        ({"type": "date"}, "2020-01-01", "2020-01-01"),
        ({}, "1", "1"),
        (None, "[1]", "[1]"),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1", "[1"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "red", "red"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "a", "a"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "auto", "auto"),
        ({"anyOf": [{"anyOf": [{"type": "integer"}]}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{}, {"type": "null"}]}, "x", "x"),
        ({"$ref": "#/$defs/Place"}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"const": 3}, "3", 3),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": {"of": 3}, "anyOf": 5}, "x", "x"),
    ],
)
def test_a_text_is_what_the_schema_says_of_it(schema: Any, text: str, expected: Any) -> None:
    value, problem = typed(text, schema)
    assert (value, type(value), problem) == (expected, type(expected), "")
