"""Templates that can be continued behind a turn, in tokens, and those that cannot."""

from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.continuation import Continuation
from isobit.data.encoding import special_token_ids
from isobit.data.harmony import writes_harmony
from isobit.data.stop_tokens import HARMONY_ENDS
from isobit.data.tool_calls import tool_format
from isobit.util.errors import ConfigError
from tests.data.test_chat_templates import FAMILIES, tokenizer_of

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
    **dict.fromkeys(("qwen3_5", "qwen3_coder"), "qwen3_coder"),
    "gpt_oss": "harmony",
}
REFUSED = {"deepseek_r1_distill"}
REMOVES_THOUGHTS = {*REFUSED, "gpt_oss", "qwen3", "qwen3_5"}
"""Those whose templates remove the thoughts of a turn that the user answers."""


def continuation(family: str, **variables: Any) -> Continuation:
    tokenizer = tokenizer_of(family)
    chat = ChatConfig(date=datetime(2025, 3, 7), chat_template_kwargs=variables)
    return Continuation(tokenizer, chat, tool_format(tokenizer, chat), TOOLS, stops_of(tokenizer))


def stops_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a turn of the family."""
    known = tokenizer.get_vocab()
    own = HARMONY_ENDS if writes_harmony(tokenizer) else ENDS
    return [known[end] for end in own if end in known]


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED])
def test_a_turn_goes_on_as_the_template_writes_it(family: str) -> None:
    tokenizer, made = tokenizer_of(family), continuation(family)
    form = FORMAT_OF.get(family, "plain")
    assert tool_format(tokenizer, ChatConfig()) == form
    ended = stops_of(tokenizer)[-1 if form == "harmony" else 0]
    ids = made.token_ids(["11", "12"], ended)
    assert "11" in tokenizer.decode(ids)
    assert "12" in tokenizer.decode(ids)
    behind_a_stop_string = made.token_ids(["11", "12"], None)
    assert behind_a_stop_string[-len(ids) :] == ids
    assert len(behind_a_stop_string) == len(ids) + 1


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED])
def test_a_result_cannot_spell_a_control_token(family: str) -> None:
    tokenizer, made = tokenizer_of(family), continuation(family)
    ended = stops_of(tokenizer)[-1 if family == "gpt_oss" else 0]
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
    stops, chat = stops_of(tokenizer), ChatConfig(date=datetime(2025, 3, 7))
    if family in REMOVES_THOUGHTS:
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


@pytest.mark.parametrize(
    "read", ["", "{% set ns = namespace(thinking=thinking) %}{{ ns.thinking }}"]
)
@pytest.mark.parametrize("speaker", ["tool", "user"])
def test_a_variable_named_as_a_thought_is_no_key_of_messages(speaker: Any, read: str) -> None:
    """DeepSeek-V3.1's template drops thoughts, which stand in the content of its messages."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen2_5").backend_tokenizer)
    chat, stops = ChatConfig(), stops_of(tokenizer)
    template = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ CONTENT }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    template = read + template
    tokenizer.chat_template = template.replace("CONTENT", "m.content")
    Continuation(tokenizer, chat, "hermes", TOOLS, stops, [speaker])
    dropping = "m.content if loop.last else m.content.split('</think>')[-1]"
    tokenizer.chat_template = template.replace("CONTENT", dropping)
    with pytest.raises(ConfigError, match=r"cannot be continued: .*<think>.* became"):
        Continuation(tokenizer, chat, "hermes", TOOLS, stops, [speaker])


@pytest.mark.parametrize("name", ["\ud800", "x" * 5000, "nul\0"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "mistral_nemo", "llama3_1"])
def test_a_name_that_no_tool_has_is_not_written(family: str, name: str) -> None:
    made, ended = continuation(family), stops_of(tokenizer_of(family))[-1]
    text = str(tokenizer_of(family).decode(made.token_ids(["error"], ended, names=[name])))
    assert name not in text and "error" in text
    assert text == tokenizer_of(family).decode(made.token_ids(["error"], ended, names=["isobit"]))


def test_a_template_that_writes_what_no_tokenizer_reads_is_refused() -> None:
    tokenizer = tokenizer_of("smollm2")
    before = str(tokenizer.chat_template)
    tokenizer.chat_template = before + "{{ '\\ud800' }}"
    try:
        with pytest.raises(ConfigError, match=r"refuses .* UnicodeEncodeError"):
            continuation("smollm2")
    finally:
        tokenizer.chat_template = before  # of all tests


def test_a_template_with_another_format_inside_of_hermes_tag_is_refused() -> None:
    """GLM's."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer)
    tokenizer.chat_template = "{{ tools }}{% for c in messages %}<tool_call><arg_key>{% endfor %}"
    with pytest.raises(ConfigError, match="calls of tools in a format that Isobit does not read"):
        tool_format(tokenizer, ChatConfig())


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
