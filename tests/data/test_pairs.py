"""Pairs of preferences: both conversations, and what a user reads when a row is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isobit.config.examples import JsonlExamples, SftDataConfig
from isobit.data.pairs import Pair, build_pairs
from isobit.errors import DataError
from tools.starter.tokenizer import EOS_ID, build_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
USER, GOOD, BAD = (
    {"role": role, "content": content}
    for role, content in (("user", "1+1="), ("assistant", "2"), ("assistant", "3"))
)


def pairs(
    tmp_path: Path, rows: list[dict[str, Any]], template: str | None = None, **changes: Any
) -> list[Pair]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(64)
    tokenizer.chat_template = template
    columns = {key: changes.pop(key) for key in ("chosen", "rejected") if key in changes}
    source = JsonlExamples(path=path, **columns)
    config = SftDataConfig(train=source, **changes)
    return build_pairs("train", source, tokenizer, config, context_tokens=64)


def text(ids: tuple[int, ...]) -> str:
    decoded = build_tokenizer(64).decode(list(ids), skip_special_tokens=True)
    assert isinstance(decoded, str)
    return decoded


def test_a_pair_is_two_conversations_of_one_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "good": "2", "bad": "13", "level": 1}]
    (pair,) = pairs(tmp_path, rows, chosen="good", rejected="bad")
    assert (text(pair.chosen_ids), text(pair.rejected_ids)) == ("1+1=2", "1+1=13")
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == EOS_ID
    assert (pair.prompt.id, pair.prompt.text, pair.prompt.row["level"]) == ("train/0", "1+1=", 1)
    assert pair.tokens == len(pair.chosen_ids) + len(pair.rejected_ids)
    assert pair.learnt == (pair.chosen_ids, pair.rejected_ids)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": "3"},
    ],
)
def test_answers_may_be_text_messages_or_whole_conversations(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    (pair,) = pairs(tmp_path, [row], CHAT)
    assert text(pair.chosen_ids) == "<user>1+1=<assistant>2"
    assert text(pair.rejected_ids) == "<user>1+1=<assistant>3"


OTHER = {"role": "user", "content": "2+2="}


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt": "1=", "chosen": "2"}, {}, r"line 2: no column 'rejected'.*`chosen` and"),
        ({"prompt": "1=", "chosen": "2", "rejected": 3}, {}, "column 'rejected': expected text"),
        ({"prompt": "1=", "chosen": "2", "rejected": "2"}, {}, "'rejected' are the same"),
        (
            {"prompt": "1+1=", "chosen": [OTHER, GOOD], "rejected": "3"},
            {},
            "column 'chosen': expected text or one message .* found list",
        ),
        (
            {"prompt": "1=", "chosen": "2", "rejected": "3" * 9},
            {"max_tokens": 12},
            "line 2: prompt and answer have 13 tokens, more than data.max_tokens = 12",
        ),
        (
            {"prompt": "1=", "chosen": "2" * 70, "rejected": "3"},
            {},
            "more than the model's context = 64",
        ),
    ],
)
def test_an_unusable_row_is_named(
    tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    good = {"prompt": "1=", "chosen": "1", "rejected": "2"}
    with pytest.raises(DataError, match=message):
        pairs(tmp_path, [good, row], **changes)


def test_too_long_pairs_are_dropped_where_the_recipe_says_so(tmp_path: Path) -> None:
    good = {"prompt": "1=", "chosen": "1", "rejected": "2"}
    long = {"prompt": "1=", "chosen": "2", "rejected": "3" * 9}
    made = pairs(tmp_path, [long, good], max_tokens=12, too_long="drop")
    assert [pair.prompt.id for pair in made] == ["train/1"]
