"""Rendering, tokenising and checking prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isobit.config.data import ChatConfig, DataConfig, JsonlData
from isobit.data.prompts import Noticed, TooLong, build_prompts, prompts_of_rows
from isobit.data.sources import Row
from isobit.util.errors import DataError
from tools.starter.tokenizer import BOS_ID, build_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Add"}, {"role": "user", "content": "1+1="}]


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    made = build_tokenizer(context_tokens=64)
    made.chat_template = template
    return made


def data(tmp_path: Path, *prompts: Any, **options: Any) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": prompt, "answer": index}) for index, prompt in enumerate(prompts)
        )
    )
    return DataConfig(train=JsonlData(path=path), **options)


def test_text_stands_as_it_is_without_a_template(tmp_path: Path) -> None:
    config = data(tmp_path, "1+1=", "2+2=")
    made = tokenizer()
    first, second = build_prompts("train", config.train, made, config)
    assert (first.id, first.text, dict(first.row)) == ("train/0", "1+1=", {"answer": 0})
    assert second.id == "train/1"
    assert first.token_ids[0] == BOS_ID
    assert made.decode(list(first.token_ids[1:])) == "1+1="


def test_a_template_renders_text_as_one_user_message(tmp_path: Path) -> None:
    config = data(tmp_path, "1+1=", MESSAGES)
    made = tokenizer(TEMPLATE)
    text, messages = build_prompts("train", config.train, made, config)
    assert text.text == "<user>1+1=;<assistant>"
    assert messages.text == "<system>Add;<user>1+1=;<assistant>"
    assert BOS_ID not in text.token_ids, "the template writes the special tokens, not the tokenizer"


def test_chat_off_ignores_the_template_for_text(tmp_path: Path) -> None:
    config = data(tmp_path, "1+1=", chat=False)
    (prompt,) = build_prompts("train", config.train, tokenizer(TEMPLATE), config)
    assert prompt.text == "1+1="


@pytest.mark.parametrize(
    ("prompt", "template", "options", "message"),
    [
        (MESSAGES, None, {}, r"no chat template; give text, or .*\(chat_template.jinja\)"),
        (MESSAGES, TEMPLATE, {"chat": False}, "data.chat is false"),
        ([{"role": "tool", "content": "x"}], TEMPLATE, {}, "template refuses .*no tools"),
        ("1+\ud8001=", None, {}, "lone surrogate at character 2"),
        ("1+1=", TEMPLATE + "{{ '\\ud800' }}", {}, "lone surrogate .* or from the chat template"),
        (
            "1" * 20,
            None,
            {"max_prompt_tokens": 20},
            r"prompt train/1 .*line 2\) has 21 tokens, more than data.max_prompt_tokens = 20",
        ),
        ("1" * 63, None, {}, r"line 2\) has 64 tokens and leaves no room in the model's context"),
    ],
)
def test_an_unusable_prompt_is_named(
    tmp_path: Path, prompt: Any, template: str | None, options: dict[str, Any], message: str
) -> None:
    config = data(tmp_path, "1+1=", prompt, **options)
    with pytest.raises(DataError, match=message):
        build_prompts("train", config.train, tokenizer(template), config, context_tokens=64)


def test_an_empty_prompt_is_an_error(tmp_path: Path) -> None:
    config = data(tmp_path, "")
    with pytest.raises(DataError, match=r"prompt train/0 .* is empty"):
        build_prompts("train", config.train, tokenizer("{{ messages[0].content }}"), config)


def test_the_longest_allowed_prompt_passes(tmp_path: Path) -> None:
    config = data(tmp_path, "1" * 19, max_prompt_tokens=20)
    (prompt,) = build_prompts("train", config.train, tokenizer(), config, context_tokens=21)
    assert len(prompt.token_ids) == 20


def test_rows_at_hand_need_no_limit() -> None:
    (prompt,) = prompts_of_rows(
        "typed", [Row("1" * 2000, {}, "prompt 0")], tokenizer(), ChatConfig()
    )
    assert (prompt.id, len(prompt.token_ids)) == ("typed/0", 2001)


@pytest.mark.parametrize(("rule", "left"), [("drop", [3]), ("cut", [24, 3])])
def test_one_limit_holds_for_the_prompt_and_its_longest_completion(
    tmp_path: Path, rule: Any, left: list[int]
) -> None:
    config = data(tmp_path, "1" * 30, "1=", too_long=rule)
    prompts = build_prompts("train", config.train, tokenizer(), config, 64, new_tokens=40)
    assert [len(prompt.token_ids) for prompt in prompts] == left
    with pytest.raises(DataError, match=r"max_new_tokens = 64 leaves no room .* context of 64"):
        build_prompts("train", config.train, tokenizer(), config, 64, new_tokens=64)


@pytest.mark.parametrize(("new", "left"), [(40, 33), (63, 33), (64, 33)])
def test_a_refused_prompt_names_the_completion_that_would_fit(
    tmp_path: Path, new: int, left: int
) -> None:
    config = data(tmp_path, "1" * 30)
    message = (
        rf"has 31 tokens; with max_new_tokens = {new} that is {31 + new}, more than the model's "
        rf"context of 64: lower max_new_tokens to {left} or shorten the prompt; data.too_long"
    )
    with pytest.raises(DataError, match=message):
        build_prompts("train", config.train, tokenizer(), config, 64, new_tokens=new)


LONG = "1+2+3+4+5+6+7+8+9="


def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    config = data(tmp_path, "1+1=", LONG, "2+2=", max_prompt_tokens=8, too_long="drop")
    seen = Noticed(TooLong(config.too_long))
    prompts = build_prompts("train", config.train, tokenizer(), config, noticed=seen)
    assert [prompt.id for prompt in prompts] == ["train/0", "train/2"], "ids are those of the rows"
    assert seen.too_long.describe() == "1 too long: dropped"
    only = data(tmp_path, LONG, max_prompt_tokens=8, too_long="drop")
    with pytest.raises(DataError, match="all 1 rows of train are too long"):
        build_prompts("train", only.train, tokenizer(), only)


@pytest.mark.parametrize(
    ("limits", "context"),
    [({"max_prompt_tokens": 8}, None), ({}, 9), ({"max_prompt_tokens": 9}, 9)],
)
def test_long_prompts_are_cut_and_counted(
    tmp_path: Path, limits: dict[str, int], context: int | None
) -> None:
    config = data(tmp_path, "1+1=", LONG, too_long="cut", **limits)
    seen = Noticed(TooLong(config.too_long))
    short, cut = build_prompts("train", config.train, tokenizer(), config, context, noticed=seen)
    assert short.text == "1+1="
    assert len(cut.token_ids) == 8 and cut.token_ids[0] == BOS_ID
    assert cut.text == LONG[-len(cut.text) :] and tokenizer().decode(list(cut.token_ids[1:])) == (
        cut.text
    )
    assert cut.content == LONG
    assert seen.too_long.describe() == "1 too long: cut"


def test_a_cut_prompt_of_a_template_ends_with_the_beginning_of_the_answer(tmp_path: Path) -> None:
    config = data(tmp_path, LONG, too_long="cut", max_prompt_tokens=15)
    made = tokenizer(TEMPLATE)
    (prompt,) = build_prompts("train", config.train, made, config)
    whole = f"<user>{LONG};<assistant>"
    assert len(prompt.token_ids) == 15
    assert prompt.text and whole.endswith(prompt.text) and prompt.text.endswith("<assistant>")


def test_a_text_of_megabytes_is_refused_dropped_or_cut_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data(tmp_path, "1+1=", "1" * (1 << 20), max_prompt_tokens=20)
    made = tokenizer()
    longest: list[int] = []

    call = type(made).__call__

    def measured(self: Any, text: str, **options: Any) -> Any:
        longest.append(len(text))
        return call(self, text, **options)

    monkeypatch.setattr(type(made), "__call__", measured)
    with pytest.raises(DataError, match=r"prompt train/1 .* has 1,048,576 characters, more than"):
        build_prompts("train", config.train, made, config)
    dropping = config.model_copy(update={"too_long": "drop"})
    assert len(build_prompts("train", config.train, made, dropping)) == 1
    cutting = config.model_copy(update={"too_long": "cut"})
    (_, cut) = build_prompts("train", config.train, made, cutting)
    assert len(cut.token_ids) == 20 and cut.token_ids[0] == BOS_ID
    assert max(longest) < 1000
