"""Examples of supervised fine-tuning: what is learnt, where it ends, and what a user reads when a
row is wrong.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isobit.config.examples import JsonlExamples, SftDataConfig
from isobit.data.examples import Example, build_examples
from isobit.data.tokenizer import decode
from isobit.errors import DataError
from tools.starter.tokenizer import BOS_ID, EOS_ID, build_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' "
    "else ';' }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}"
)
TALK = [
    {"role": "system", "content": "Add"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


def examples(
    tmp_path: Path, rows: list[dict[str, Any]], template: str | None = None, **changes: Any
) -> list[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(64)
    tokenizer.chat_template = template
    source = JsonlExamples(
        path=path,
        messages=changes.pop("messages", None),
        completion=changes.pop("completion", "completion"),
    )
    return build_examples(
        "train",
        source,
        tokenizer,
        (EOS_ID,),
        SftDataConfig(train=source, **changes),
        context_tokens=64,
    )


def text(example: Example) -> str:
    return decode(build_tokenizer(64), example.completion_ids)


def test_a_completion_is_tokenised_by_itself_and_ends(tmp_path: Path) -> None:
    (example,) = examples(tmp_path, [{"prompt": "1+1=", "completion": "2", "answer": "2"}])
    assert example.prompt.token_ids[0] == BOS_ID
    assert example.prompt.row["answer"] == "2"
    assert text(example) == "2"
    assert example.completion_ids[-1] == EOS_ID and BOS_ID not in example.completion_ids
    assert example.tokens == 5 + 2


def test_a_completion_that_ends_already_gets_no_second_end(tmp_path: Path) -> None:
    (example,) = examples(tmp_path, [{"prompt": "1+1=", "completion": "2<eos>"}])
    assert example.completion_ids.count(EOS_ID) == 1


def test_a_template_puts_the_completion_behind_its_generation_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": TALK[:2], "completion": [{"role": "assistant", "content": "2"}]},
    ]
    first, second = examples(tmp_path, rows, CHAT)
    assert first.prompt.text == "<user>1+1=; <assistant>"
    assert second.prompt.text == "<system>Add; <user>1+1=; <assistant>"
    for example in (first, second):
        assert text(example) == "2"
        assert example.completion_ids[-1] == EOS_ID, (
            "the template's white space after the end of the turn is not learnt"
        )


def test_every_turn_of_the_assistant_is_an_example(tmp_path: Path) -> None:
    first, second = examples(tmp_path, [{"talk": TALK, "id": 7}], CHAT, messages="talk")
    assert first.prompt.text == "<system>Add; <user>1+1=; <assistant>"
    assert (
        second.prompt.text == "<system>Add; <user>1+1=; <assistant>2<eos> <user>2+2=; <assistant>"
    )
    assert (text(first), text(second)) == ("2", "4")
    assert [example.prompt.id for example in (first, second)] == ["train/0", "train/1"]
    assert first.prompt.row == {"id": 7}


@pytest.mark.parametrize(
    ("row", "template", "changes", "message"),
    [
        (
            {"prompt": "1="},
            None,
            {},
            "line 2: no column 'completion' with the text to be learnt; the columns are none",
        ),
        (
            {"prompt": "1=", "completion": 2},
            None,
            {},
            "line 2, column 'completion': expected text or one message .* found int",
        ),
        (
            {"prompt": "1=", "completion": TALK[:1]},
            CHAT,
            {},
            "expected text or one message of the assistant, found list",
        ),
        ({"prompt": TALK[:2], "completion": "2"}, None, {}, "the tokenizer has no chat template"),
        (
            {"prompt": "1=", "completion": "2"},
            BRACKETS,
            {},
            "does not put the assistant's turn behind its own generation prompt",
        ),
        (
            {"prompt": "1=", "completion": "2" * 9},
            None,
            {"max_tokens": 12},
            r"train/1 .* has 13 tokens, 10 .* data.max_tokens = 12",
        ),
        ({"prompt": "1=", "completion": "2" * 70}, None, {}, "more than the model's context = 64"),
    ],
)
def test_an_unusable_row_is_named(
    tmp_path: Path, row: Any, template: str | None, changes: dict[str, Any], message: str
) -> None:
    good = {"prompt": "1=", "completion": "1"} if template != BRACKETS else row
    with pytest.raises(DataError, match=message):
        examples(tmp_path, [good, row], template, **changes)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ("1+1=", "expected a list of messages with 'role' and 'content', found text"),
        (TALK[:2], "no message has the role 'assistant'"),
        (TALK[2:], "the first message is the assistant's"),
    ],
)
def test_an_unusable_conversation_is_named(tmp_path: Path, talk: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        examples(tmp_path, [{"talk": talk}], CHAT, messages="talk")


def test_too_long_examples_are_dropped_where_the_recipe_says_so(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2" * n} for n in (9, 1, 90)]
    made = examples(tmp_path, rows, max_tokens=12, too_long="drop")
    assert [example.prompt.id for example in made] == ["train/1"]
    with pytest.raises(DataError, match=r"all 2 rows of train are too long"):
        examples(tmp_path, rows[::2], max_tokens=12, too_long="drop")


def test_parts_of_text_are_learnt_as_their_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2"}]
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": parts}]
    row = {"prompt": [talk[0]], "completion": talk}
    (one,) = examples(tmp_path, [row], CHAT)
    assert text(one) == "2"
    (whole,) = examples(tmp_path, [{"talk": talk}], CHAT, messages="talk")
    assert (whole.prompt.token_ids, whole.learnt) == (one.prompt.token_ids, one.learnt)
