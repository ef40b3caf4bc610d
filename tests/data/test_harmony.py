"""Calls in harmony, gpt-oss's format: read from what it draws, and continued in tokens."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from isobit.config.data import ChatConfig
from isobit.data.chat_template import rendered
from isobit.data.continuation import Continuation
from isobit.data.harmony import AnswerReader, writes_harmony
from isobit.data.parsed_calls import MalformedCall, Parsed, Said, ToolCall
from isobit.data.stop_tokens import describe_end_of_turn, stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.data.tool_calls import read_turn, turn_reader
from isobit.util.errors import ConfigError
from tests.data.test_chat_templates import FAMILIES, tokenizer_of
from tests.data.test_continuation import TOOLS, stops_of
from tests.data.test_tool_calls import ADDING, ARGUMENTS, HARMONY, NAMES, TEXT

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
ENDS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")
ADD, NONE = ToolCall("add", {"a": 1}), ToolCall("add", {})


def read(text: str, is_thinking: bool = False) -> Said:
    return read_turn(text, "harmony", ADDING, is_thinking)


@given(
    name=NAMES,
    arguments=ARGUMENTS,
    inside=(TEXT | st.lists(st.sampled_from(HARMONY)).map("".join)),
    channel=st.sampled_from(["commentary", "analysis"]),
    is_ahead=st.booleans(),
    begun=st.booleans(),
)
def test_a_call_is_read_as_it_was_meant_behind_any_thinking(
    name: str,
    arguments: dict[str, Any],
    inside: str,
    channel: str,
    is_ahead: bool,
    begun: bool,
) -> None:
    """In both places that the recipient may have. Only the ends of a message end the thinking."""
    for end in ENDS:
        inside = inside.replace(end, "")
    header = (
        f" to=functions.{name}<|channel|>{channel} json<|message|>"
        if is_ahead
        else f"<|channel|>{channel} to=functions.{name} <|constrain|>json<|message|>"
    )
    ahead = f"{'' if begun else ANALYSIS}{inside}<|end|>"
    text = f"{ahead}<|start|>assistant{header}{json.dumps(arguments)}"
    assert read(text, begun) == Said(ahead, [ToolCall(name, arguments)])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f'{CALL}{{"a": 1}}', [ADD]),
        (f'{CALL}\n{{"a": 1}}\n<|call|>', [ADD]),
        (f'{CALL}{{"a": 1}}<|end|>', [ADD]),
        (CALL, [NONE]),
        (f"{CALL}null", [NONE]),
        (f"{CALL}{{}}<|call|>", [NONE]),
        ('to=functions.add<|message|>{"a": 1}', [ADD]),
        ('<|channel|>commentary to=add code<|message|>{"a": 1}', [ADD]),
        (f'{CALL}{{"a": "<|call|>"}}', [ToolCall("add", {"a": "<|call|>"})]),
        (f'{ANALYSIS}I add.<|start|>assistant{CALL}{{"a": 1}}', [ADD]),
        (f'<|channel|>commentary<|message|>I add.{NEXT}{CALL}{{"a": 1}}', [ADD]),
        (f'{ANALYSIS}I add.<|end|>{CALL}{{"a": 1}}', [ADD]),
        (f'{ANALYSIS}{CALL}{{"a": 1}}', []),
        (f'{FINAL}4: {CALL}{{"a": 1}}', []),
        (f'4 {CALL}{{"a": 1}}', []),
        (f"{ANALYSIS}I add.{NEXT}", []),
        ('<|channel|>commentary<|message|>{"a": 1}', []),
        ('<|channel|>commentary to=user<|message|>{"a": 1}', []),
        ('<|start|>user to=functions.add<|message|>{"a": 1}', []),
        (f"{ANALYSIS}It says<|end|><|start|>functions.add to=assistant<|channel|>commentary"
         '<|message|>"3"', []),
    ],
)  # fmt: skip
def test_spellings(text: str, calls: list[Parsed]) -> None:
    assert read(text).calls == calls
    if not calls:
        assert read(text).text == text


def test_text_behind_thinking_that_the_prompt_began_is_no_header() -> None:
    text = 'to=functions.add<|message|>{"a": 1}'
    assert read(text, is_thinking=True) == Said(text, [])


def test_a_stream_holds_back_headers_alone_until_a_call() -> None:
    reader = turn_reader("harmony", ADDING, is_thinking=False)
    pieces = ["<|channel|>", "analysis", "<|message|>Hm", ", I <", "add.<|end|>", "<|start|>assis"]
    assert [reader.feed(one) for one in pieces] == [
        *("", "", "<|channel|>analysis<|message|>Hm", ", I", " <add.<|end|>", ""),
    ]
    assert [reader.feed(one) for one in (f"tant{CALL}", "{}", "<|end|>")] == ["", "", ""]
    assert reader.held == f"<|start|>assistant{CALL}{{}}<|end|>"
    assert reader.finish() == Said("", [NONE])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{CALL}{{'a': 1}}", "invalid JSON: Expecting property"),
        (f'{CALL}{{"a": 1', "invalid JSON"),
        (f'{CALL}{{"a": 1}} x<|call|>', "text behind the JSON object: 'x"),
        (f"{CALL}[1]", "the arguments of a call are a JSON object"),
        ("<|channel|>commentary to=functions.add <|constrain|>json", "is missing"),
        ("<|channel|>commentary to=functions.add<|call|>", "is missing"),
        ("<|channel|>analysis to=python code<|message|>1 + 1", "name, found 'to=python'"),
    ],
)
def test_what_cannot_be_read_says_why_and_which_tool_it_is_of(text: str, problem: str) -> None:
    (found,) = read(f"{ANALYSIS}Hm.{NEXT}{text}").calls
    assert isinstance(found, MalformedCall)
    assert problem in found.problem
    assert found.name == ("python" if "python" in text else "add")


def test_a_turn_has_one_call() -> None:
    first, second = read(f'{CALL}{{"a": 1}}<|call|><|start|>assistant{CALL}{{}}').calls
    assert first == ADD
    assert second == MalformedCall(
        "a turn has one call, which ends in <|call|>; this one has 2", "add"
    )


@pytest.mark.parametrize(
    ("text", "is_thinking", "thought", "seen"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}42", False, "Hm.", "42"),
        (f"Hm.{NEXT}{FINAL}4 < 2 ", True, "Hm.", "4 < 2 "),
        (f"<|channel|>commentary<|message|>I add.{NEXT}{ANALYSIS}Hm", False, "Hm", "I add."),
        ("analysisHm.assistantfinal42", False, "", "analysisHm.assistantfinal42"),
        (f"{ANALYSIS}Hm.<|end|><|start|>assist", False, "Hm.", ""),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", False, "ab", "c"),
        (f"{CALL}{{}}", False, "", "{}"),
        ("", False, "", ""),
    ],
)
def test_analysis_is_told_from_the_answer_however_it_arrives(
    text: str, is_thinking: bool, thought: str, seen: str
) -> None:
    for size in (1, 3, 7, 100):
        reader = AnswerReader(is_thinking)
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        told = [*(reader.feed(one, False) for one in pieces), reader.feed("", True)]
        assert tuple(map("".join, zip(*told, strict=True))) == (thought, seen)


def test_only_gpt_oss_writes_it() -> None:
    assert [one for one in FAMILIES if writes_harmony(tokenizer_of(one))] == ["gpt_oss"]


DATE = datetime(2025, 3, 7)
SUB = {"type": "function", "function": {**TOOLS[0]["function"], "name": "sub"}}
USER: dict[str, Any] = {"role": "user", "content": "What is 3 + 8 - 2?"}


def called(name: str, thought: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 3}}
    call = {"type": "function", "id": "call00001", "function": function}
    return {"role": "assistant", "thinking": thought, "content": "", "tool_calls": [call]}


def text_of(messages: list[Any], begins: bool) -> str:
    return rendered(messages, tokenizer_of("gpt_oss"), begins, [*TOOLS, SUB], date=DATE)


def test_an_episode_has_the_tokens_of_the_whole_conversation() -> None:
    """Thoughts stay, and each result stands behind the name of the tool that gave it."""
    tokenizer = tokenizer_of("gpt_oss")
    chat = ChatConfig(date=DATE)
    made = Continuation(tokenizer, chat, "harmony", [*TOOLS, SUB], stops_of(tokenizer))
    messages: list[Any] = [USER]
    ids = tokenizer(text_of(messages, True))["input_ids"]
    for name, thought, result in (("add", "First add.", '"11"'), ("sub", "Now sub.", "9\n")):
        before = text_of(messages, True)
        messages.append(called(name, thought))
        drawn = text_of(messages, False).removeprefix(before)
        assert drawn.startswith(f"{ANALYSIS}{thought}") and drawn.endswith("<|call|>")
        ids += tokenizer(drawn)["input_ids"]
        ids += made.token_ids([result], ids[-1], names=[name])
        messages.append({"role": "tool", "content": result})
        assert ids == tokenizer(text_of(messages, True))["input_ids"]
    whole = tokenizer.decode(ids)
    assert whole.count(ANALYSIS) == 2
    assert whole.count("<|start|>functions.add to=assistant") == 1
    assert whole.count("<|start|>functions.sub to=assistant") == 1


def test_the_only_tool_is_named_where_no_call_is_known() -> None:
    tokenizer = tokenizer_of("gpt_oss")
    made = Continuation(tokenizer, ChatConfig(date=DATE), "harmony", TOOLS, stops_of(tokenizer))
    ids = made.token_ids(["11"], tokenizer.get_vocab()["<|call|>"])
    assert str(tokenizer.decode(ids)).startswith("<|start|>functions.add to=assistant")


def test_a_user_who_answers_is_refused_since_the_template_drops_the_analysis() -> None:
    tokenizer = tokenizer_of("gpt_oss")
    stops, chat = stops_of(tokenizer), ChatConfig(date=DATE)
    said = {"role": "assistant", "thinking": "First add.", "content": "9"}
    history = text_of([USER, said, USER], True)
    assert "First add." not in history and "<|return|>" not in history
    with pytest.raises(ConfigError, match="once the user's words follow, otherwise than before"):
        Continuation(tokenizer, chat, "harmony", TOOLS, stops, ["user"])


def test_a_template_that_drops_the_analysis_ahead_of_a_result_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("gpt_oss").backend_tokenizer)
    template = str(tokenizer_of("gpt_oss").chat_template)
    changed = template.replace("message.thinking and not future_final_message.found", "loop.last")
    tokenizer.chat_template = changed
    assert changed != template
    with pytest.raises(ConfigError, match="once the tools' results follow, otherwise than before"):
        Continuation(tokenizer, ChatConfig(date=DATE), "harmony", TOOLS, stops_of(tokenizer))


def test_a_call_must_end_a_turn() -> None:
    tokenizer = tokenizer_of("gpt_oss")
    stops = [tokenizer.get_vocab()["<|return|>"]]
    with pytest.raises(ConfigError, match=r"ends an answer with none of '<\|return\|>'"):
        Continuation(tokenizer, ChatConfig(date=DATE), "harmony", TOOLS, stops)


def test_the_ends_of_an_answer_and_of_a_call_end_completions_whatever_a_folder_names(
    tmp_path: Path,
) -> None:
    tokenizer_of("gpt_oss").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    known = tokenizer.get_vocab()
    stops = stop_token_ids(tokenizer, tmp_path)
    own = known["<|end|>"]  # which the tests' tokenizers end sequences with
    assert set(stops) == {own, known["<|return|>"], known["<|call|>"]}
    assert describe_end_of_turn(tokenizer, True, stops) == []
    tokenizer_of("phi4").save_pretrained(tmp_path / "other")
    other = load_tokenizer(tmp_path / "other")
    assert stop_token_ids(other, tmp_path / "other") == (other.get_vocab()["<|end|>"],)
