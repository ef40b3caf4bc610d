"""Examples, pairs and conversations: what is trained on, where it ends, and errors of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isobit.config.data import ChatConfig, JsonlExamples, SftDataConfig
from isobit.data.encoding import decode
from isobit.data.examples import (
    Example,
    Pair,
    build_examples,
    build_pairs,
    conversation_ids,
    row_of,
    whole_answer,
)
from isobit.data.prompts import Noticed, prompts_of_rows
from isobit.data.sources import Row
from isobit.records.text import Prompt
from isobit.util.errors import DataError
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

SAID_IN_NO_PARTS = {"role": "user", "content": [{"a": 1}, 7]}
DEEP = json.loads("[" * 300 + "]" * 300)


def examples(
    tmp_path: Path, rows: list[dict[str, Any]], template: str | None = None, **changes: Any
) -> list[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(64)
    tokenizer.chat_template = template
    source = JsonlExamples(path=path, messages=changes.pop("messages", None))
    noticed = changes.pop("noticed", None)
    config = SftDataConfig(train=source, **changes)
    return build_examples("train", source, tokenizer, (EOS_ID,), config, 64, noticed=noticed)


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
        ({"prompt": "1="}, None, {}, "line 2: no column 'completion' .* the columns are none"),
        ({"prompt": "1=", "completion": 2}, None, {}, "line 2, column 'completion': .* found int"),
        ({"prompt": "1=", "completion": TALK[:1]}, CHAT, {}, "one message .*, found list"),
        ({"prompt": TALK[:2], "completion": "2"}, None, {}, "the tokenizer has no chat template"),
        ({"prompt": "1=", "completion": "2"}, BRACKETS, {}, "the chat template does not put"),
        (
            {"prompt": "1=", "completion": "2" * 9},
            None,
            {"max_tokens": 12},
            r"train/1 .* has 13 tokens, 10 .* data.max_tokens = 12",
        ),
        ({"prompt": "1=", "completion": "2" * 70}, None, {}, "more than the model's context = 64"),
        ({"prompt": "1=", "completion": "2\ud800"}, None, {}, "lone surrogate at character 1"),
        ({"prompt": "1=", "completion": ["a", [TALK[2]]]}, None, {}, "found list"),
        ({"prompt": "1=", "completion": [SAID_IN_NO_PARTS, TALK[2]]}, CHAT, {}, "found list"),
        ({"prompt": "1=", "completion": [TALK[2] | {"x": DEEP}]}, CHAT, {}, "nested too deeply"),
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
        ("1+1=", "expected a list of messages, found text"),
        (TALK[:2], "no message has the role 'assistant'"),
        (TALK[2:], "the first message is the assistant's"),
    ],
)
def test_an_unusable_conversation_is_named(tmp_path: Path, talk: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        examples(tmp_path, [{"talk": talk}], CHAT, messages="talk")


MARKED = [
    *TALK[:2],
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize(
    "mark",
    [
        *({key: False} for key in ("loss", "trainable", "train", "training")),
        *({"weight": 0}, {"weight": 0.0}, {"loss_mask": 0}, {"step_loss_mask": 0}),
        *({"loss": "false"}, {"weight": 1, "train": False}),
    ],
)
def test_a_turn_that_is_marked_is_not_learnt_but_read(tmp_path: Path, mark: dict[str, Any]) -> None:
    talk = [{**one, **(mark if one["content"] == "3" else {"weight": 1})} for one in MARKED]
    noticed = Noticed()
    (only,) = examples(tmp_path, [{"talk": talk}], CHAT, messages="talk", noticed=noticed)
    assert only.prompt.id == "train/1" and text(only) == "4"
    assert only.prompt.text == "<system>Add; <user>1+1=; <assistant>3<eos> <user>2+2=; <assistant>"
    assert noticed.lines("train") == [
        "train: 1 answer marked as not to be learnt: left out",
        "train: messages of 'system', 'user' are marked as to be learnt, but only answers of the "
        "assistant are",
    ]


def test_answers_without_a_character_are_told(tmp_path: Path) -> None:
    blank = [
        {"prompt": "1+1=", "completion": ""},
        {"prompt": "1+2=", "completion": " "},
        {"prompt": "1+3=", "completion": [{"role": "assistant", "content": ""}]},
        {"prompt": "1+3=", "completion": [{"role": "assistant", "content": "", "weight": 0}]},
        {"prompt": "", "completion": "2"},
    ]
    noticed = Noticed()
    examples(tmp_path, blank, CHAT, noticed=noticed)
    assert noticed.lines("train") == [
        "train: 1 of 5 prompts are empty",
        "train has 3 answers without text, from which the model learns to end at once; drop them "
        "if that is not meant",
        "train: 1 answer marked as not to be learnt: left out",
    ]
    noticed = Noticed()
    pairs(tmp_path, [{"prompt": "1+1=", "chosen": "2", "rejected": ""}], noticed=noticed)
    assert noticed.lines("train")[0].startswith("train has 1 answer without text")


def test_marks_without_an_answer_to_learn_and_other_keys_are_told(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "2", "weight": 0}
    with pytest.raises(DataError, match="all answers of train are marked as not to be learnt"):
        examples(tmp_path, [{"prompt": "1+1=", "completion": [answer]}], CHAT)
    noticed = Noticed()
    talk = [{**one, "weight": 0.5, "score": 3, "name": "x"} for one in TALK[1:3]]
    assert len(examples(tmp_path, [{"talk": talk}], CHAT, messages="talk", noticed=noticed)) == 1
    (line,) = noticed.lines("train")
    assert line.endswith("neither Isobit nor the chat template reads: 'score', 'weight'")


@pytest.mark.parametrize("row", [{"prompt": "1" * 10**6}, {"completion": "1" * 10**6}])
def test_what_is_far_too_long_is_not_tokenised_whole(
    tmp_path: Path, row: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, tokenise = list[int](), PreTrainedTokenizerFast._encode_plus

    def counted(self: Any, text: Any, *given: Any, **options: Any) -> Any:
        read.extend(map(len, [text] if isinstance(text, str) else text))
        return tokenise(self, text, *given, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counted)
    with pytest.raises(DataError, match="more than the model's context = 64"):
        examples(tmp_path, [{"prompt": "1=", "completion": "2", **row}], CHAT)
    rejected = row.get("completion", "3")
    with pytest.raises(DataError, match="more than the model's context = 64"):
        pairs(tmp_path, [{"prompt": "1=", "chosen": "2", "rejected": rejected, **row}], CHAT)
    assert len(read) > 2 and max(read) < 10_000


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


CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ADD = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("column", ["messages", "completion"])
def test_calls_of_tools_are_learnt(tmp_path: Path, column: str) -> None:
    asked = {"role": "user", "content": "1"}
    call = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    row = {"talk": [asked, call], "prompt": [asked], "completion": [call]}
    names = {"messages": "talk"} if column == "messages" else {}
    (one,) = examples(tmp_path, [row], CALLS, **names)
    decoded = tokenizer_with().decode(list(one.learnt), skip_special_tokens=False)
    assert str(decoded).startswith('add{"a": 1};')
    if column == "completion":
        with pytest.raises(
            DataError, match="the answer has tool_calls, which only a chat template"
        ):
            examples(tmp_path, [{"prompt": "1", "completion": [call]}])


def test_a_prompt_that_ends_in_an_answer_is_answered_in_a_turn_of_its_own(tmp_path: Path) -> None:
    """Only completions that are sampled go on with it."""
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    (one,) = examples(tmp_path, [{"prompt": talk, "completion": "3"}], CALLS)
    assert one.prompt.text == "user:1;assistant:2;assistant:"


def test_a_reward_model_reads_a_prefill_as_a_part_of_the_answer() -> None:
    talk = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "})
    row, answer = whole_answer(Row(talk, {}, ""), "2")
    assert (row.prompt, answer) == (talk[:1], "It is 2")
    assert whole_answer(Row(talk[:1], {}, ""), "2") == (Row(talk[:1], {}, ""), "2")
    assert whole_answer(Row("1+1=", {}, ""), "2")[1] == "2"


TALK_CONVERSATIONS = ({"role": "system", "content": "Add"}, {"role": "user", "content": "1+1="})


def tokenizer_with(template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = template
    return tokenizer


def text_conversations(ids: tuple[int, ...]) -> str:
    decoded = tokenizer_with().decode(list(ids), skip_special_tokens=False)
    assert isinstance(decoded, str)
    return decoded


def test_without_a_template_the_texts_follow_one_another_and_end() -> None:
    row = Row("1+1=", {}, "line 1")
    ids, ended = conversation_ids([(row, "2"), (row, "2<eos>")], tokenizer_with())
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert text_conversations(ids[1:-1]) == "1+1=2"
    assert ended == ids, "an answer that has its end gets no second one"


def test_a_template_writes_the_whole_conversation_up_to_its_last_white_space() -> None:
    expected = "<user>1+1=; <assistant>2<eos> "
    for prompt in ("1+1=", TALK_CONVERSATIONS[1:]):
        (ids,) = conversation_ids([(Row(prompt, {}, "line 1"), "2")], tokenizer_with(CHAT))
        assert text_conversations(ids) == expected
    (ids,) = conversation_ids(
        [(Row("1+1=", {}, ""), "2")], tokenizer_with(CHAT), ChatConfig(chat=False)
    )
    assert text_conversations(ids) == "<bos>1+1=2<eos>"


def test_messages_without_a_template_and_no_token_at_all_are_refused() -> None:
    with pytest.raises(DataError, match=r"line 1: .* the tokenizer has no chat template"):
        conversation_ids([(Row(TALK_CONVERSATIONS, {}, "line 1"), "2")], tokenizer_with())
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
    (prompt,) = prompts_of_rows(
        "p", [Row(TALK_CONVERSATIONS, {}, "")], tokenizer_with(policys), ChatConfig()
    )
    other = tokenizer_with(reward_models)
    (ids,) = conversation_ids([(row_of(prompt, other), "2")], other)
    assert text_conversations(ids) == expected


@pytest.mark.parametrize("policys", [None, CHAT])
def test_a_prompt_of_text_is_that_text_whatever_the_policy_read(policys: str | None) -> None:
    (prompt,) = prompts_of_rows("p", [Row("1+1=", {}, "")], tokenizer_with(policys), ChatConfig())
    chat, plain = (CHAT, "<user>1+1=; <assistant>2<eos> "), (None, "<bos>1+1=2<eos>")
    of_no_dataset = Prompt("p", "1+1=", ())
    for one, template, expected in ((prompt, *chat), (prompt, *plain), (of_no_dataset, *plain)):
        other = tokenizer_with(template)
        (ids,) = conversation_ids([(row_of(one, other), "2")], other)
        assert text_conversations(ids) == expected


CHAT_PAIRS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
USER, GOOD, BAD = (
    {"role": role, "content": content}
    for role, content in (("user", "1+1="), ("assistant", "2"), ("assistant", "3"))
)


def pairs(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    template: str | None = None,
    noticed: Noticed | None = None,
    **changes: Any,
) -> list[Pair]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(64)
    tokenizer.chat_template = template
    columns = {key: changes.pop(key) for key in ("chosen", "rejected") if key in changes}
    source = JsonlExamples(path=path, **columns)
    config = SftDataConfig(train=source, **changes)
    return build_pairs("train", source, tokenizer, config, context_tokens=64, noticed=noticed)


def text_pairs(ids: tuple[int, ...]) -> str:
    return decode(build_tokenizer(64), ids)


def test_a_pair_is_two_conversations_of_one_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "good": "2", "bad": "13", "level": 1}]
    (pair,) = pairs(tmp_path, rows, chosen="good", rejected="bad")
    assert (text_pairs(pair.chosen_ids), text_pairs(pair.rejected_ids)) == ("1+1=2", "1+1=13")
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
    (pair,) = pairs(tmp_path, [row], CHAT_PAIRS)
    assert text_pairs(pair.chosen_ids) == "<user>1+1=<assistant>2"
    assert text_pairs(pair.rejected_ids) == "<user>1+1=<assistant>3"


def test_a_pair_with_a_marked_answer_is_left_out(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "chosen": [GOOD], "rejected": [BAD]}
    marked = {**row, "rejected": [{**BAD, "weight": 0}]}
    (pair,) = pairs(tmp_path, [marked, row], CHAT_PAIRS)
    assert pair.prompt.id == "train/1"


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
            "'chosen': .* found list",
        ),
        (
            {"prompt": "1=", "chosen": "2", "rejected": "3" * 9},
            {"max_tokens": 12},
            "line 2: prompt and answer have 13 tokens, more than data.max_tokens = 12",
        ),
        ({"prompt": "1=", "chosen": "2" * 70, "rejected": "3"}, {}, "the model's context = 64"),
    ],
)
def test_an_unusable_row_is_named_pairs(
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
