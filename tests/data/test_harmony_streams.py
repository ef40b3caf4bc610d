"""Harmony that arrives in pieces says what the whole says, and no text of it is lost."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isobit.data.harmony import AnswerReader
from isobit.data.parsed_calls import MalformedCall, Parsed, Said, ToolCall
from isobit.data.thinking import Portions
from isobit.data.tool_calls import read_turn, turn_reader
from tests.data.test_harmony import ADD, ANALYSIS, CALL, FINAL, NEXT, NONE
from tests.data.test_tool_calls import ADDING, HARMONY

WORDS = [
    *(
        *HARMONY,
        "to",
        " to",
        "=",
        "t",
        "<",
        " ",
        "\n",
        "functions",
        ".add",
        " json",
        "code",
        "final",
    ),
    *("<|constrain|>", "<|message|>", "{}", '{"a":1}', "x" * 401, " " * 401),
]
PARTS = st.lists(st.sampled_from(WORDS), max_size=14)
AHEAD = [" to", "=", "functions", ".add", "<|channel|>", "commentary", " json", "<|message|>"]


def cuts(text: str, sizes: Sequence[int]) -> list[str]:
    """The text in pieces of these sizes, and its rest letter by letter."""
    pieces, place = list[str](), 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    return [*pieces, *text[place:]]


def answer(pieces: Sequence[str], is_thinking: bool = False) -> Portions:
    reader = AnswerReader(is_thinking)
    told = [*(reader.feed(one, False) for one in pieces), reader.feed("", True)]
    return Portions(*map("".join, zip(*told, strict=True)))


@settings(max_examples=400)
@given(parts=PARTS, sizes=st.lists(st.integers(0, 9), max_size=12), is_thinking=st.booleans())
@example(["<|start|>", "assistant", *AHEAD, '{"a":1}'], [], False)
@example([*AHEAD, '{"a":1}'], [], False)
@example(["x", " " * 900, "<|start|>", *AHEAD, '{"a":1}'], [], False)
def test_any_pieces_say_what_the_whole_says(
    parts: list[str], sizes: list[int], is_thinking: bool
) -> None:
    text = "".join(parts)
    whole = read_turn(text, "harmony", ADDING, is_thinking)
    for pieces in (parts, cuts(text, sizes)):
        reader = turn_reader("harmony", ADDING, is_thinking)
        begin = "".join(map(reader.feed, pieces))
        rest = reader.finish()
        assert Said(begin + rest.text, rest.calls) == whole
        assert answer(pieces, is_thinking) == answer([text], is_thinking)


def test_a_recipient_ahead_of_the_channel_is_a_call_in_pieces() -> None:
    reader = turn_reader("harmony", ADDING, False)
    pieces = ["<|start|>", "assistant", *AHEAD, '{"a":1}']
    assert [reader.feed(one) for one in pieces] == [""] * len(pieces)
    assert reader.finish() == Said("", [ADD])


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        *((one, one) for one in (" to", "t", "<", " ", "to=5 is it", "<|mess")),
        ("to=5<|end|>", "to=5"),
        ("<|channel|>final 42", "42"),
        ("<|channel|>final 4 <", "4 <"),
        (f"{ANALYSIS}Hm{NEXT}<|channel|>final 42<|end|>", "42"),
        ('<|channel|>final <|constrain|>json {"a": 4}', '{"a": 4}'),
        ('<|channel|>final <|constrain|>{"a": 4}', '{"a": 4}'),
        ("<|channel|>final", ""),
        ("<|channel|>analysis Hm", ""),
        (f"{ANALYSIS}Hm<|end|>42", "42"),
        ('<|channel|>commentary to=functions.add {"a":1}',) * 2,
        (f"<|channel|>commentary {'x' * 500}<|message|>4",) * 2,
    ],
)
def test_text_that_is_no_message_is_not_lost(text: str, seen: str) -> None:
    assert answer([text]) == answer(list(text))
    assert answer([text]).answer == seen


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary code to=functions.add<|message|>",
        "<|channel|>commentary <|constrain|>json to=functions.add<|message|>",
        "<|start|>assistant to=functions.add code<|channel|>commentary<|message|>",
        "<|channel|> to=functions.add<|message|>",
        "<|channel|>to=functions.add<|message|>",
        "<|channel|>commentary to= functions.add<|message|>",
        "<|start|>assistant code to=functions.add<|message|>",
        "<|start|> to=functions.add<|message|>",
        "to= functions.add json<|message|>",
        "to=functions.add<|constrain|>json<|message|>",
    ],
)
def test_a_header_that_names_a_recipient_is_a_call_wherever_it_does(header: str) -> None:
    for ahead in ("", f"{ANALYSIS}Hm<|end|>"):
        assert read_turn(f"{ahead}{header}{{}}", "harmony", ADDING, False) == Said(ahead, [NONE])
    assert answer([f"{header}{{}}"]) == ("", "{}")


def test_two_channels_of_one_header_are_text_behind_which_a_call_may_stand() -> None:
    ahead = "<|channel|>analysis<|channel|>4<|end|>"
    assert read_turn(f"{ahead}{CALL}{{}}", "harmony", ADDING, False) == Said(ahead, [NONE])
    assert answer([f"{ahead}{FINAL}2"]).answer == "<|channel|>analysis<|channel|>42"


@pytest.mark.parametrize("blank", ["", "\n"])
def test_a_call_without_arguments_counts_once_its_turn_has_ended(blank: str) -> None:
    def calls(text: str, has_ended: bool, form: Any = "harmony") -> list[Parsed]:
        return read_turn(text, form, ADDING, False, has_ended).calls

    for form, text in (("harmony", f"{CALL}{blank}"), ("mistral", f"[TOOL_CALLS]add[ARGS]{blank}")):
        assert calls(text, True, form) == [NONE]
        (cut,) = calls(text, False, form)
        assert isinstance(cut, MalformedCall) and "was cut" in cut.problem
    assert calls(f"{CALL}{blank}<|call|>", False) == [NONE]
    assert calls(f"{CALL}{{}}{blank}", False) == [NONE]
    assert calls(f'{CALL}{{"a": 1}}', False) == [ToolCall("add", {"a": 1})]


@pytest.mark.parametrize(
    "begin", ["<|start|>assistant", "<|channel|>commentary to=functions.add", ""]
)
@pytest.mark.parametrize("piece", ["x to", " ", "\n "])
def test_time_grows_as_the_text_does(begin: str, piece: str) -> None:
    """Headers that never end, and white space that may belong to one."""
    pieces = [begin, *[piece] * 30_000]
    reader, answers = turn_reader("harmony", ADDING, False), AnswerReader(False)
    start = time.process_time()
    for one in pieces:
        reader.feed(one)
        answers.feed(one, False)
    reader.finish()
    answers.feed(FINAL, True)
    assert time.process_time() - start < 2
