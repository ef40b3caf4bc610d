"""Messages as datasets and requests write them, with earlier calls of tools."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.records.messages import message_of, read_prompt, read_tools, read_variables
from isobit.util.errors import DataError

USER = {"role": "user", "content": "a"}


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("calls", [[], (), "", "[]", "null", None])
def test_no_calls_are_no_calls(calls: Any) -> None:
    turn = {"role": "assistant", "content": "b", "tool_calls": calls}
    assert read_prompt([USER, turn], "row") == (USER, {"role": "assistant", "content": "b"})


@pytest.mark.parametrize("arguments", ["", "  ", "null", None, {}, "missing"])
def test_no_arguments_are_an_empty_table(arguments: Any) -> None:
    given = {} if arguments == "missing" else {"arguments": arguments}
    _, turn = read_prompt([USER, called(name="f", **given)], "row")
    assert turn == called(name="f", arguments={})


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_arguments_stay_as_they_are_written_and_calls_may_be_flat(arguments: Any) -> None:
    turn = called(name="f", arguments=arguments)
    assert read_prompt([USER, turn], "row")[1] == turn
    flat = {"role": "assistant", "content": [], "tool_calls": [{"name": "f", "arguments": {}}]}
    assert read_prompt([USER, flat], "row")[1] == {key: flat[key] for key in ("role", "tool_calls")}


def test_a_call_in_the_older_form_is_a_call() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}
    read = read_prompt([USER, older], "row")[1]
    assert isinstance(read, dict) and read["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "content": None}, "the message says nothing"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "the message says nothing"),
        ({"role": "assistant", "content": []}, "the message says nothing"),
        ({"role": "assistant", "content": 5}, "text or a list of parts as 'content', found int 5"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "a part of type 'image'"),
        ({"content": "b"}, "expected a message with 'role'"),
        ("b", "expected a message with 'role'"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "expected a list as 'tool_calls'"),
        ({"role": "assistant", "tool_calls": "f()"}, "expected a list as 'tool_calls'"),
        ({"role": "assistant", "tool_calls": [None]}, "tool call 1: expected {'type': 'function'"),
        ({"role": "assistant", "function_call": "auto"}, "tool call 1: expected {'type'"),
        (called(name=""), "tool call 1: expected {'type': 'function'"),
        (called(name="f", arguments="x=1"), "tool call 1: the arguments of 'f' are a table or its"),
        (called(name="f", arguments=[1]), "tool call 1: the arguments of 'f' are a table or its"),
    ],
)
def test_a_message_that_cannot_be_read_is_named_by_its_number(message: Any, problem: str) -> None:
    with pytest.raises(DataError) as error:
        read_prompt([USER, message, USER], "d.jsonl, line 7")
    assert str(error.value).startswith("d.jsonl, line 7, message 2") and problem in str(error.value)


def test_a_written_conversation_is_refused_and_not_taken_for_text() -> None:
    with pytest.raises(DataError, match="message 2: the message says nothing"):
        read_prompt('[{"role": "user", "content": "a"}, {"role": "assistant"}]', "row")


def test_other_keys_of_sharegpt_are_kept() -> None:
    rows = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}]
    assert read_prompt(rows, "row")[1] == {"role": "assistant", "content": "b", "train": False}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text"]
            ),
            below,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(messages=st.lists(JSON, max_size=3))
def test_messages_are_read_or_refused(messages: list[Any]) -> None:
    try:
        read_prompt(messages, "row")
    except DataError as error:
        assert str(error).startswith("row")  # noqa: PT017 (either is right)


@pytest.mark.parametrize("depth", [101, 300, 900])
@pytest.mark.parametrize("opened", ["[", '{"a": '])
def test_what_is_nested_too_deeply_for_a_conversation_is_refused(depth: int, opened: str) -> None:
    """Python gives up on what calls itself for each container at some hundreds."""
    closed = "]" if opened == "[" else "}"
    text = opened * depth + "1" + closed * depth
    deep = json.loads(text)
    said = {"role": "user", "content": "1+1="}
    for prompt in ([said | {"x": deep}], [said | {"content": deep}], deep, {"role": deep}):
        with pytest.raises(DataError, match=r"row 0.*: nested too deeply; expected at most 100"):
            read_prompt(prompt, "row 0")
    for read in (read_tools, read_variables):
        with pytest.raises(DataError, match="row 0: nested too deeply"):
            read([deep], "row 0")
        with pytest.raises(DataError, match=r"row 0.*: expected .* found str"):
            read(text, "row 0")
    call = {"name": "f", "arguments": text}
    with pytest.raises(DataError, match="the arguments of 'f' are a table"):
        message_of({"role": "assistant", "tool_calls": [call]}, "row 0")
    nested = json.loads("[" * 98 + "]" * 98)
    assert read_prompt([said | {"x": nested}], "row 0") == (said | {"x": nested},)
