"""Chat templates of model families: rendered as transformers renders them, to the same tokens."""

import json
import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from isobit.config.data import ChatConfig
from isobit.data.chat_template import CLOCK
from isobit.data.prompts import Noticed, prompts_of_rows
from isobit.data.sources import row_of
from isobit.util.errors import DataError

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
DATE = datetime(2025, 3, 7, 8, 30)
_BAR = "[|\uff5c]"
_CONTROL = re.compile(
    rf"<{_BAR}[^<>|\uff5c]+{_BAR}>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z_]{{4,}}\]"
)
"""How control tokens of these families are spelt."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A token a byte, and the control tokens that the template writes."""
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    control = [*sorted(set(_CONTROL.findall(template))), "<|begin|>", "<|end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>"
    )
    for one in control:
        tokenizer.add_tokens(AddedToken(one, special=True), special_tokens=True)
    for one in ("<think>", "</think>"):
        tokenizer.add_tokens(AddedToken(one, special=False))
    tokenizer.chat_template = template
    return tokenizer


USER = {"role": "user", "content": "How warm is it in Zürich?"}
SYSTEM = {"role": "system", "content": "Be short."}
ANSWER = {"role": "assistant", "content": "It is mild."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "21"}
THOUGHT = {"role": "assistant", "content": "Mild.", "reasoning_content": "It is May."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "From today."},
                },
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS: dict[str, tuple[list[Any], list[Any] | None]] = {
    "one question": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, ANSWER, USER], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "a call and its result": ([SYSTEM, USER, CALL, RESULT], TOOLS),
    "thoughts": ([USER, THOUGHT, USER], None),
    "prefill": ([USER, {"role": "assistant", "content": "It is about"}], None),
    "prefill after turns": (
        [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "The answer:\n- "}],
        None,
    ),
    "prefill with tools": ([USER, {"role": "assistant", "content": "Let me see"}], TOOLS),
}
VARIABLES: dict[str, list[dict[str, Any]]] = {
    "qwen3": [{"enable_thinking": False}, {"enable_thinking": True}],
    "smollm3": [{"enable_thinking": False}, {"enable_thinking": True}],
    "gpt_oss": [{"reasoning_effort": "high"}, {"model_identity": "You are Ada."}],
    "llama3_1": [{"date_string": "1 Apr 2026"}, {"tools_in_user_message": False}],
    "llama3_2": [{"date_string": "1 Apr 2026"}],
}


def by_transformers(
    family: str,
    messages: list[Any],
    tools: list[Any] | None,
    variables: dict[str, Any],
) -> tuple[str, list[int]] | None:
    """Text and tokens by transformers itself, at the time DATE; None where the template refuses."""
    tokenizer = tokenizer_of(family)
    compiled = chat_template_utils._compile_jinja_template(tokenizer.get_chat_template())
    compiled.globals[CLOCK] = DATE.strftime
    continues = messages[-1]["role"] == "assistant"
    options: dict[str, Any] = {
        "tools": tools,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "return_dict": False,
        **variables,
    }
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids: Any = tokenizer.apply_chat_template(messages, **options)
        return str(text), list(ids)
    except Exception:  # whatever a template raises
        return None


def ours(
    family: str,
    messages: list[Any],
    tools: list[Any] | None = None,
    variables: dict[str, Any] | None = None,
) -> tuple[str, list[int]]:
    chat = ChatConfig(chat_template_kwargs=variables or {}, date=DATE)
    row = row_of(messages, {}, "row", tools=tools)
    (prompt,) = prompts_of_rows("p", [row], tokenizer_of(family), chat)
    return prompt.text, list(prompt.token_ids)


@pytest.mark.few(37)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_tokens_are_those_of_transformers(family: str, name: str) -> None:
    messages, tools = CONVERSATIONS[name]
    for variables in [{}, *VARIABLES.get(family, [])]:
        expected = by_transformers(family, messages, tools, variables)
        if expected is not None:
            assert ours(family, messages, tools, variables) == expected
        elif "prefill" not in name:
            with pytest.raises(DataError, match="refuses the messages"):
                ours(family, messages, tools, variables)


def test_only_gemma_refuses_a_conversation() -> None:
    refused = {
        (family, name)
        for family in FAMILIES
        for name, (messages, tools) in CONVERSATIONS.items()
        if by_transformers(family, messages, tools, {}) is None
    }
    assert refused == {("gemma3", "a call and its result")}


READS_CLOCK = {"llama3_2", "gpt_oss", "mistral_small"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_reads_the_clock_shows_the_date_given(family: str) -> None:
    chats = [ChatConfig(date=DATE), ChatConfig(date=datetime(2031, 12, 24))]
    rows = [row_of([USER], {}, "row")]
    first, second = (prompts_of_rows("p", rows, tokenizer_of(family), chat)[0] for chat in chats)
    assert (first.text != second.text) == (family in READS_CLOCK)


@pytest.mark.parametrize("begun", ["<think>\nOkay,", "<think>\nHm.\n</think>\n\nThe answer is"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_with_its_own_thoughts_opens_them_once(family: str, begun: str) -> None:
    """Qwen3's template puts an empty thought before it, DeepSeek-R1's takes thoughts away."""
    for variables in [{}, *VARIABLES.get(family, [])]:
        text, ids = ours(family, [USER, {"role": "assistant", "content": begun}], None, variables)
        assert text.endswith(begun)
        assert text[text.index("Zürich") :].count("<think>") == 1
        assert tokenizer_of(family).decode(ids) == text


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gemma3"])
def test_a_call_without_content_is_a_call_with_empty_content(family: str) -> None:
    """OpenAI's form has null there, which half of the templates refuse."""
    several = [
        [SYSTEM, USER, call, RESULT]
        for call in (CALL, CALL | {"content": None}, {k: CALL[k] for k in ("role", "tool_calls")})
    ]
    first, *others = [ours(family, messages, TOOLS)[0] for messages in several]
    for other in others:
        assert other in (first, first.replace("None", ""))


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gemma3"])
def test_arguments_as_json_text_are_not_quoted_again(family: str) -> None:
    function = {"name": "weather", "arguments": '{"city": "Z\u00fcrich", "days": 1}'}
    call = CALL | {"tool_calls": [CALL["tool_calls"][0] | {"function": function}]}
    text, _ = ours(family, [SYSTEM, USER, call, RESULT], TOOLS)
    assert '\\"city' not in text
    noticed = Noticed()
    row = row_of([SYSTEM, USER, call, RESULT], {}, "row", tools=TOOLS)
    prompts_of_rows("p", [row], tokenizer_of(family), ChatConfig(), noticed=noticed)
    silent = family in ("deepseek_v3", "olmo2", "phi4", "smollm2", "smollm3")
    assert any("calls of tools that the" in line for line in noticed.lines("p")) == silent
    if not silent:
        assert text == ours(family, [SYSTEM, USER, CALL, RESULT], TOOLS)[0]


@pytest.mark.few(9)
@pytest.mark.parametrize("said", ["", '{"a": 1}', '{"a": 1}, or "{\\"a\\": 1}"'])
@pytest.mark.parametrize("arguments", ["{}", '{"a": 1}', '{"a": "{}"}'])
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gemma3"])
def test_json_text_is_not_quoted_again_whatever_else_is_said(
    family: str, arguments: str, said: str
) -> None:
    """Empty arguments look the same in quotes, and others may stand in a message too."""
    texts = list[str]()
    for written in (arguments, json.loads(arguments)):
        function = {"name": "weather", "arguments": written}
        call = CALL | {"tool_calls": [CALL["tool_calls"][0] | {"function": function}]}
        user = {"role": "user", "content": f"Now {said}"}
        texts.append(ours(family, [user, call, RESULT], TOOLS)[0])
    assert texts[0] == texts[1]


@pytest.mark.few(9)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_of_a_message_can_spell_a_control_token(family: str) -> None:
    """Whatever a dataset's texts are: calls, results, thoughts, tools and variables."""
    tokenizer = tokenizer_of(family)
    control = {n: str(one) for n, one in tokenizer.added_tokens_decoder.items() if one.special}
    evil = "".join(control.values())

    def spell(value: Any) -> Any:
        if isinstance(value, dict):
            kept = ("role", "type")
            return {name: one if name in kept else spell(one) for name, one in value.items()}
        if isinstance(value, list):
            return [spell(one) for one in value]
        return value + evil if isinstance(value, str) and value else value

    for messages, tools in CONVERSATIONS.values():
        try:
            _, expected = ours(family, messages, tools)
        except DataError:
            continue
        try:
            _, found = ours(family, spell(messages), spell(tools))
        except DataError:
            continue  # Mistral's want ids of nine letters
        assert [one for one in found if one in control] == [
            one for one in expected if one in control
        ]


def test_variables_of_a_row_come_after_those_of_the_recipe() -> None:
    chat = ChatConfig(chat_template_kwargs={"enable_thinking": False})
    rows = [
        row_of([USER], {}, "row"),
        row_of([USER], {}, "row", variables={"enable_thinking": True}),
        row_of([USER], {}, "row", variables='{"enable_thinking": true}'),
    ]
    off, on, written = prompts_of_rows("p", rows, tokenizer_of("qwen3"), chat)
    assert off.text.endswith("<think>\n\n</think>\n\n")
    assert on.text.endswith("assistant\n") and on.text == written.text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"enable_thinkin": True}, "no variable 'enable_thinkin'; did you mean enable_thinking"),
        ({"sky": True}, "no variable 'sky'; leave it out, or name one that"),
        ({"add_generation_promt": True}, "'add_generation_promt'; leave it out"),
        ({"tokenize": True}, "'tokenize' is no variable"),
        ({"messages": []}, "'messages' is no variable"),
        ({"add_generation_prompt": False}, "rendering sets it itself"),
    ],
)
def test_a_variable_that_no_template_reads_is_refused(
    variables: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ours("qwen3", [USER], None, variables)


def test_variables_without_a_template_are_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer)
    kwargs = {"enable_thinking": False}
    for chat, why in ((True, "the tokenizer has no chat template"), (False, "data.chat is false")):
        config = ChatConfig(chat=chat, chat_template_kwargs=kwargs)
        with pytest.raises(DataError, match=f"data.chat_template_kwargs is set, but {why}"):
            prompts_of_rows("p", [row_of("1+1=", {}, "row")], bare, config)
    noticed = Noticed()
    rows = [row_of("1+1=", {}, "row", tools=TOOLS)]
    prompts_of_rows("p", rows, bare, ChatConfig(), noticed=noticed)
    assert "1 of 1 rows have tools" in noticed.lines("p")[0]


def test_what_the_model_would_not_see_is_noticed() -> None:
    noticed = Noticed()
    written = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    rows = [row_of(written, {}, "row"), row_of([USER], {}, "row", tools=TOOLS)]
    prompts_of_rows("p", rows, tokenizer_of("smollm2"), ChatConfig(), noticed=noticed)
    first, second = noticed.lines("train")
    assert "1 of 2 prompts spell control tokens that the chat template writes itself" in first
    assert "<|im_end|>" in first and "set data.chat = false" in first
    assert "1 of 2 rows have tools" in second
    honest = Noticed()
    prompts_of_rows(
        "p", [row_of("Hi", {}, "")], tokenizer_of("qwen3"), ChatConfig(), noticed=honest
    )
    assert honest.lines("train") == []


def test_a_call_of_tools_cannot_be_gone_on_with() -> None:
    with pytest.raises(DataError, match="calls tools, which cannot be gone on with"):
        ours("qwen3", [USER, CALL], TOOLS)


ITEMS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}{% endfor %};"
    "{% endfor %}"
)
JOINED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ 'call:' + c.function.arguments }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize("arguments", [{"city": "Bern"}, '{"city": "Bern"}'])
@pytest.mark.parametrize(
    ("template", "written"), [(ITEMS, "<city>Bern"), (JOINED, 'call:{"city": "Bern"}')]
)
def test_arguments_have_the_form_that_the_template_takes(
    template: str, written: str, arguments: Any
) -> None:
    """Qwen3-Coder's goes through a table, DeepSeek's appends a text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer)
    tokenizer.chat_template = template
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    messages = [USER, {"role": "assistant", "tool_calls": calls}, RESULT]
    (prompt,) = prompts_of_rows("p", [row_of(messages, {}, "row")], tokenizer, ChatConfig())
    assert written in prompt.text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_that_was_said_before_or_is_empty_stays_open(family: str) -> None:
    for begun in ("It is mild.", "It", ""):
        messages = [USER, ANSWER, USER, {"role": "assistant", "content": begun}]
        text, _ = ours(family, messages)
        asked, _ = ours(family, messages[:-1])
        assert text.count("Zürich") == 2 and text.endswith(begun)
        assert text == asked if not begun else "It is mild." in text[: -len(begun)]
