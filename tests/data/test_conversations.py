"""Conversations as a reward model reads them: one text, its end, and the prompt of a run rendered
again.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from isobit.data.conversations import conversation_ids, row_of
from isobit.data.prompts import prompts_of_rows
from isobit.data.sources import Row
from isobit.errors import DataError
from isobit.records.text import Prompt
from tools.starter.tokenizer import BOS_ID, EOS_ID, build_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' "
    "else ';' }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = ({"role": "system", "content": "Add"}, {"role": "user", "content": "1+1="})


def tokenizer_with(template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = template
    return tokenizer


def text(ids: tuple[int, ...]) -> str:
    decoded = tokenizer_with().decode(list(ids), skip_special_tokens=False)
    assert isinstance(decoded, str)
    return decoded


def test_without_a_template_the_texts_follow_one_another_and_end() -> None:
    row = Row("1+1=", {}, "line 1")
    ids, ended = conversation_ids([(row, "2"), (row, "2<eos>")], tokenizer_with())
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert text(ids[1:-1]) == "1+1=2"
    assert ended == ids, "an answer that has its end gets no second one"


def test_a_template_writes_the_whole_conversation_up_to_its_last_white_space() -> None:
    expected = "<user>1+1=; <assistant>2<eos> "
    for prompt in ("1+1=", TALK[1:]):
        (ids,) = conversation_ids([(Row(prompt, {}, "line 1"), "2")], tokenizer_with(CHAT))
        assert text(ids) == expected
    (ids,) = conversation_ids([(Row("1+1=", {}, ""), "2")], tokenizer_with(CHAT), chat=False)
    assert text(ids) == "<bos>1+1=2<eos>"


def test_messages_without_a_template_and_no_token_at_all_are_refused() -> None:
    with pytest.raises(DataError, match=r"line 1: .* the tokenizer has no chat template"):
        conversation_ids([(Row(TALK, {}, "line 1"), "2")], tokenizer_with())
    with pytest.raises(DataError, match="line 1: prompt and answer together have no token"):
        conversation_ids([(Row("1", {}, "line 1"), "")], tokenizer_with("{{ '' }}"))


@pytest.mark.parametrize(
    ("policys", "reward_models", "expected"),
    [
        (CHAT, "{% for m in messages %}[{{ m.content }}]{% endfor %}", "[Add][1+1=][2]"),
        (CHAT, None, "<bos><system>Add; <user>1+1=; <assistant>2<eos>"),
    ],
)
def test_a_prompt_of_messages_is_rendered_again_where_there_is_a_template(
    policys: str, reward_models: str | None, expected: str
) -> None:
    (prompt,) = prompts_of_rows("p", [Row(TALK, {}, "")], tokenizer_with(policys), chat=True)
    other = tokenizer_with(reward_models)
    (ids,) = conversation_ids([(row_of(prompt, other), "2")], other)
    assert text(ids) == expected


@pytest.mark.parametrize("policys", [None, CHAT])
def test_a_prompt_of_text_is_that_text_whatever_the_policy_read(policys: str | None) -> None:
    (prompt,) = prompts_of_rows("p", [Row("1+1=", {}, "")], tokenizer_with(policys), chat=True)
    for template, expected in (
        (CHAT, "<user>1+1=; <assistant>2<eos> "),
        (None, "<bos>1+1=2<eos>"),
    ):
        other = tokenizer_with(template)
        (ids,) = conversation_ids([(row_of(prompt, other), "2")], other)
        assert text(ids) == expected


def test_a_prompt_of_no_dataset_is_its_text() -> None:
    tokenizer = tokenizer_with()
    (ids,) = conversation_ids([(row_of(Prompt("p", "1+1=", ()), tokenizer), "2")], tokenizer)
    assert text(ids) == "<bos>1+1=2<eos>"
