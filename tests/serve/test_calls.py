"""Calls of tools in answers: in every format, whole and in pieces, and by OpenAI's client."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.thinking import Portions
from isobit.data.tokenizer import load_tokenizer
from isobit.rollout.sequence import decode
from isobit.serve.prompt_reader import PromptReader
from isobit.serve.protocol import ChatRequest
from isobit.serve.response_formats import ChatFormat
from isobit.serve.token_texts import ChoicePart, ScoredPrompt, Spelling
from isobit.starter import starter_folder
from tests.data.test_harmony import DATE, tokenizer_of
from tests.serve.servers import BROKEN, KEY, Running, call_text

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD = '{"name": "add", "arguments": {"a": [1, "é\\n"]}}'
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
GIVEN = {"a": [1, "é\n"]}
ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
SAYS = "<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def form(calls: ToolFormat | None, **asked: Any) -> ChatFormat:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], **asked}
    return ChatFormat(ChatRequest.model_validate(body), Spelling(str), calls)


@pytest.mark.parametrize(
    ("calls", "text", "content", "count"),
    [
        ("hermes", f"I add. \n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", "I add.", 2),
        ("hermes", "a <tool_ca", "a <tool_ca", 0),
        ("hermes", " 1 <  2 \n\n", " 1 <  2 \n\n", 0),
        ("hermes", f"<tool_call>{ADD}</tool_call><tool_call>{{</tool_call>", None, 0),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, 0),
        ("mistral", f"Well[TOOL_CALLS][{ADD}, {ADD}]", "Well", 2),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": [1, "é\\n"]}', "", 1),
        ("mistral", "[TOOL_CALLS][", None, 0),
        ("llama3", f" {ADD}; {ADD}", "", 2),
        ("llama3", f"x<|python_tag|>{ADD}", "x", 1),
        ("llama3", '{"answer": 3}', None, 0),
        ("llama3", f"so {ADD}", None, 0),
        (
            "hermes",
            f"<think><tool_call>{ADD}</tool_call></think> Hm <tool_call>{ADD}",
            f"<think><tool_call>{ADD}</tool_call></think> Hm",
            1,
        ),
        ("hermes", f"[THINK]<tool_call>{ADD}</tool_call>", None, 0),
        ("hermes", f"<tool_call>{ADD.replace('add', 'sub')}</tool_call>", None, 0),
        ("llama3", f"<think>{ADD}</think>\n{ADD}", f"<think>{ADD}</think>", 1),
        ("llama3", '{"name": "Copper", "mass": 63}', None, 0),
        (None, f"<tool_call>{ADD}</tool_call>", None, 0),
        ("harmony", f"{ANALYSIS}I add.{NEXT}{CALL}{json.dumps(GIVEN)}", "", 1),
        ("harmony", f"{SAYS}I add.{NEXT}{CALL}{json.dumps(GIVEN)}", "I add.", 1),
        ("harmony", f"{ANALYSIS}Hm{NEXT}<|channel|>final<|message|>It is 4. ", "It is 4. ", 0),
        ("harmony", f"{ANALYSIS}Hm{NEXT}{CALL}[1", "[1", 0),
        ("harmony", "It is 4.", None, 0),
    ],
)
def test_pieces_say_what_the_whole_says(
    calls: ToolFormat | None, text: str, content: str | None, count: int
) -> None:
    """However a text is cut; a call that cannot be read stays text."""
    prompt = ScoredPrompt("x", (1, 2))
    whole = form(calls).choice(prompt, ChoicePart(0, text, finish_reason="stop"))
    message = whole["message"]
    assert (message["content"] or "") == (text if content is None else content)
    assert whole["finish_reason"] == ("tool_calls" if count else "stop")
    found = message.get("tool_calls", [])
    assert [json.loads(one["function"]["arguments"]) for one in found] == [GIVEN] * count
    for size in (1, 2, 5, 11):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        streamed = form(calls)
        told = [streamed.delta(prompt, ChoicePart(0, piece)) for piece in pieces]
        last = streamed.delta(prompt, ChoicePart(0, finish_reason="stop"))
        told.append(last)
        for key in ("content", "reasoning_content"):
            said = "".join(one["delta"].get(key, "") for one in told)
            assert said == (message.get(key) or "")
        assert [one for one in told[:-1] if "tool_calls" in one["delta"]] == []
        listed = last["delta"].get("tool_calls", [])
        assert listed == [{"index": at, **call} for at, call in enumerate(found)]
        assert last["finish_reason"] == whole["finish_reason"]


def check_portions(
    calls: ToolFormat | None, asked: dict[str, Any], read: ScoredPrompt, text: str, wanted: Portions
) -> dict[str, Any]:
    """A turn has these portions as a whole, and in pieces of any size.  -> Its message."""
    whole = form(calls, **asked).choice(read, ChoicePart(0, text, finish_reason="stop"))
    message: dict[str, Any] = whole["message"]
    assert message.get("reasoning_content", "") == wanted.thinking
    assert (message["content"] or "") == wanted.answer
    for size in (1, 2, 3, 5, 100):
        streamed = form(calls, **asked)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        told = [streamed.delta(read, ChoicePart(0, piece))["delta"] for piece in pieces]
        told.append(streamed.delta(read, ChoicePart(0, finish_reason="stop"))["delta"])
        assert "".join(one.get("reasoning_content", "") for one in told) == wanted.thinking
        assert "".join(one.get("content", "") for one in told) == wanted.answer
    return message


@pytest.mark.parametrize(
    ("calls", "prompt", "text", "thinking", "content"),
    [
        (
            "hermes",
            "x",
            "\n<think>\nHm < 2</th\n</think>\n\n4 <think>",
            "\nHm < 2</th\n",
            "4 <think>",
        ),
        ("qwen3_coder", "x", "<think>\n\n</think>\n\n4\n", "", "4\n"),
        ("hermes", "x<think>\n", " \n</think>\r\n\n", "", ""),
        ("hermes", "x<think>", "\n </think> \n4", "", " \n4"),
        ("hermes", "x", "<think>\n ", "", ""),
        ("hermes", "x", "<think>\n a\n", "\n a\n", ""),
        ("hermes", "x", f"<think>\n</think>\n\n<tool_call>{ADD}", "", ""),
        ("hermes", "x<think>\n", "Hm</think>4", "Hm", "4"),
        ("hermes", "x", "4</think>", "", "4</think>"),
        ("hermes", "x", "<thin", "", "<thin"),
        ("hermes", "x", "<thin ice>", "", "<thin ice>"),
        ("hermes", "x", " \n ", "", " \n "),
        ("mistral", "x", "[THINK]Hm[/THINK]4", "Hm", "4"),
        ("mistral", "x", "[THINK]Hm[/THI", "Hm[/THI", ""),
        (None, "x<think>", "Hm", "Hm", ""),
        ("hermes", "x", f"<think>Hm</think>So\n<tool_call>{ADD}", "Hm", "So"),
        ("harmony", "x", f"{ANALYSIS}Hm{NEXT}<|channel|>final<|message|>4", "Hm", "4"),
        ("harmony", f"x{ANALYSIS}", f"Hm{NEXT}{CALL}{json.dumps(GIVEN)}", "Hm", ""),
    ],
)
def test_thinking_is_told_from_content(
    calls: ToolFormat | None, prompt: str, text: str, thinking: str, content: str
) -> None:
    """Between tags where the request asks for it, else it is content as it was drawn."""
    read, asked = ScoredPrompt(prompt, (1, 2)), {"separate_reasoning": True}
    message = check_portions(calls, asked, read, text, Portions(thinking, content))
    plain = form(calls).choice(read, ChoicePart(0, text, finish_reason="stop"))["message"]
    if calls == "harmony":
        assert plain == message
    else:
        assert "reasoning_content" not in plain
        assert "tool_calls" in plain or plain["content"] == text


def test_thinking_that_the_prompt_has_begun_has_no_calls() -> None:
    draft = f"<tool_call>{ADD}</tool_call>"
    for text, count in ((draft, 0), (f"{draft}</think>{draft}", 1)):
        for pieces in ([text], [*text]):
            made, prompt = form("hermes"), ScoredPrompt("assistant\n<think>\n", (1,))
            told = [made.delta(prompt, ChoicePart(0, piece)) for piece in pieces]
            told.append(made.delta(prompt, ChoicePart(0, finish_reason="stop")))
            calls = [one for piece in told for one in piece["delta"].get("tool_calls", [])]
            said = "".join(piece["delta"].get("content", "") for piece in told)
            assert (len(calls), said) == (count, text[: -len(draft)] if count else text)


def test_tools_of_any_form_are_no_error() -> None:
    for tools in ([{"x": 1}], [{"name": "add"}], [{"function": 5}]):
        made = form("hermes", tools=tools)
        part = ChoicePart(0, f"<tool_call>{ADD}</tool_call>", finish_reason="stop")
        named = tools == [{"name": "add"}]
        assert (
            bool(made.choice(ScoredPrompt("x", (1,)), part)["message"].get("tool_calls")) == named
        )


def test_an_answer_that_is_cut_off_has_its_calls_and_says_so() -> None:
    part = ChoicePart(0, f"<tool_call>{ADD}</tool_call><tool", finish_reason="length")
    made = form("hermes").choice(ScoredPrompt("x", (1,)), part)
    assert made["finish_reason"] == "length" and len(made["message"]["tool_calls"]) == 1
    none = form("hermes", tool_choice="none").choice(ScoredPrompt("x", (1,)), part)
    assert none["message"] == {"role": "assistant", "content": part.text}


def test_a_conversation_with_calls_by_the_client(server: Running) -> None:
    """Hot samples of a model of which most capitals are calls, whole and streamed; then the
    results of the calls are told to the model.
    """
    import openai

    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)
    messages: list[Any] = [{"role": "user", "content": "3+8="}]
    asked: Any = {
        "model": "chatty", "messages": messages, "tools": [TOOL], "tool_choice": "auto", "n": 12,
        "seed": 5, "temperature": 50, "max_tokens": 4, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    made = client.chat.completions.create(**asked, logprobs=True)
    calling = [one for one in made.choices if one.message.tool_calls]
    assert 0 < len(calling) < 12
    for choice in made.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        tokens = [one.token for one in choice.logprobs.content]
        drawn = "".join(one for one in tokens if one not in SPECIAL)
        calls: Any = choice.message.tool_calls or []
        said = list(map(call_text, _numbers(choice.message))) if calls else []
        assert [one for one in tokens if one.startswith("<tool") and one != BROKEN] == said or (
            BROKEN in tokens and not said
        )
        content, _, _ = drawn.partition("<tool_call>")
        assert (choice.message.content or "") == (content.rstrip() if said else drawn)
    plain = client.chat.completions.create(**asked | {"tool_choice": "none"})
    assert not any(one.message.tool_calls for one in plain.choices)
    assert any("<tool_call>" in (one.message.content or "") for one in plain.choices)
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        (piece,) = chunk.choices
        kept = streamed.setdefault(piece.index, {"content": "", "calls": [], "end": None})
        kept["content"] += piece.delta.content or ""
        kept["calls"] += [one.id for one in piece.delta.tool_calls or []]
        kept["end"] = piece.finish_reason or kept["end"]
    for choice in made.choices:
        message = choice.message
        assert streamed[choice.index] == {
            "content": message.content or "",
            "calls": [call.id for call in message.tool_calls or []],
            "end": choice.finish_reason,
        }
    first: Any = calling[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": one.id, "content": "7"} for one in first.tool_calls
    ]
    turn = first.model_dump(exclude_none=True)
    more = client.chat.completions.create(
        model="chatty", messages=[*messages, turn, *results], tools=[TOOL], max_tokens=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert more.model_extra is not None
    seen = decode(load_tokenizer(starter_folder()), more.model_extra["prompt_token_ids"])
    shown = (
        "".join(map(call_text, _numbers(first)))
        .replace('"name": "add", "arguments": ', '"arguments": ')
        .replace("}}<", '}, "name": "add"}<')
    )
    assert seen == (
        f"tool: add; user: 3+8=; assistant: {first.content or ''}{shown}; "
        f"{'tool: 7; ' * len(results)}assistant: "
    )
    assert len({one.id for choice in calling for one in choice.message.tool_calls or []}) == sum(
        len(one.message.tool_calls or []) for one in calling
    )


def _numbers(message: Any) -> list[int]:
    return [json.loads(call.function.arguments)["a"] for call in message.tool_calls]


@pytest.mark.parametrize(("reason", "count"), [("stop", 1), ("length", 0)])
def test_a_call_that_is_cut_ahead_of_its_arguments_is_none(reason: Any, count: int) -> None:
    """It stays text, of which a header is no part."""
    part = ChoicePart(0, f"{SAYS}I add.{NEXT}{CALL}", finish_reason=reason)
    found = form("harmony").choice(ScoredPrompt("x", (1, 2)), part)
    assert len(found["message"].get("tool_calls", [])) == count
    assert found["finish_reason"] == ("tool_calls" if count else "length")
    assert found["message"]["content"] == "I add."


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_thinking_that_clients_send_back_stands_ahead_of_its_call(family: str, key: str) -> None:
    """But where gpt-oss's template would refuse it, beside content."""
    model: Any = SimpleNamespace(context=100_000)
    reader = PromptReader(model, tokenizer_of(family), ChatConfig(date=DATE))
    tool = {"type": "function", "function": {**TOOL["function"], "description": "Adds."}}
    call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, key: "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "4"}
    begin, end = (ANALYSIS, NEXT) if family == "gpt_oss" else ("<think>\n", "\n</think>")
    for content in (None, "", "Well."):
        messages = [{"role": "user", "content": "x"}, {**said, "content": content}, result]
        body = {"model": "m", "messages": messages, "tools": [tool]}
        text = reader.rendered(ChatRequest.model_validate(body)).text
        assert (content or "") in text
        is_kept = family == "qwen3" or not content
        assert (f"{begin}Hm.{end}" in text) is is_kept, text


FINAL = f"{NEXT}<|channel|>final<|message|>"
HM = {"reasoning_content": "Hm, pa"}


@pytest.mark.parametrize(
    ("family", "begun", "text", "thinking", "content"),
    [
        ("gpt_oss", HM, f"use.{FINAL}4", "use.", "4"),
        ("gpt_oss", {"thinking": "Hm </think> "}, f"use.{FINAL}4", "use.", "4"),
        ("gpt_oss", HM, f"use.{NEXT}{CALL}{{}}", "use.", ""),
        ("gpt_oss", {"content": "<think>It"}, " is 4", "", " is 4"),
        ("gpt_oss", {"content": "It", **HM}, " is 4", "", " is 4"),
        ("qwen3", HM, "use.</think>4", "use.", "4"),
        ("qwen3", {"reasoning": "Hm <think>, pa "}, "use.</think>4", "use.", "4"),
        ("qwen3", {"thinking": " "}, "use.</think>4", "use.", "4"),
        ("qwen3", HM, f"use.<tool_call>{ADD}</tool_call></think>So<tool_call>{ADD}", None, "So"),
        ("qwen3", {"content": "<think>\nHm, pa"}, "use.</think>4", "use.", "4"),
        ("qwen3", {"content": [{"type": "text", "text": "<think>Hm"}]}, "</think>4", "", "4"),
        ("qwen3", {"content": "<think>Hm</think>\n\nIt "}, "is</think>4", "", "is</think>4"),
        ("qwen3", {"content": "A tag, <think>, be"}, "gins</think>4", "", "gins</think>4"),
        ("qwen3", {"content": "It"}, "<think>4", "", "<think>4"),
        ("qwen3", {"content": "It", **HM}, " is 4", "", " is 4"),
        ("qwen3_5", HM, "use.</think>4", "use.", "4"),
        ("qwen3_5", {"content": ""}, "use.</think>4", "use.", "4"),
        ("smollm3", {"content": "<think>\nHm, pa"}, "use.</think>4", "use.", "4"),
    ],
)
def test_thinking_that_the_request_has_begun_goes_on(
    family: str, begun: dict[str, Any], text: str, thinking: str | None, content: str
) -> None:
    """Whatever the user says of tags, and without a call in it."""
    model: Any = SimpleNamespace(context=100_000)
    reader = PromptReader(model, tokenizer_of(family), ChatConfig(date=DATE))
    user = {"role": "user", "content": "What is <think>?"}
    asked = {
        "messages": [user, {"role": "assistant", "content": "", **begun}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "separate_reasoning": True,
    }
    read = reader.rendered(ChatRequest.model_validate({"model": "m", **asked}))
    calls: ToolFormat = "harmony" if family == "gpt_oss" else "hermes"
    thinking = text.partition("</think>")[0] if thinking is None else thinking
    message = check_portions(calls, asked, read, text, Portions(thinking, content))
    assert len(message.get("tool_calls", [])) == (1 if "add" in text else 0)


def test_a_call_in_thinking_that_the_content_has_begun_is_none() -> None:
    for begun, count in (("So <think>I", 0), ("So <think>I</think>", 1), ("So I", 1)):
        part = ChoicePart(0, f" say <tool_call>{ADD}</tool_call>", finish_reason="stop")
        message = form("hermes").choice(ScoredPrompt(f"x{begun}", (1,), begun=begun), part)
        assert len(message["message"].get("tool_calls", [])) == count
