"""What a reward sees of special tokens, and what a run says of tokens, stops and turns."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.rollout import rollout_folder
from isobit.config.commands import GenerationConfig
from isobit.config.recipes import RunConfig
from isobit.records.text import Completion
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import read_rl
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError

COMMA = 16
"""The starter writes a comma in the middle of its answers."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The starter with a comma that is a special token."""
    folder = tmp_path / "special"
    shutil.copytree(starter_folder(), folder)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    found["added_tokens"].append({"id": COMMA, "content": ",", **flags, "special": True})
    path.write_text(json.dumps(found))
    return folder


SEEN = """
with open({path!r}, "a") as file:
    file.write(__import__("json").dumps([completion.text, list(completion.token_ids)]) + "\\n")
return 1.0
"""
"""A reward that notes what it is given."""


@pytest.fixture
def seen(
    make_config: Callable[..., RunConfig],
    write_reward: Callable[[str], str],
    folder: Path,
    tmp_path: Path,
) -> Callable[..., list[tuple[str, list[int]]]]:
    """Texts and tokens that the reward of a run's step is given."""

    def run(**rollout: Any) -> list[tuple[str, list[int]]]:
        path = tmp_path / "seen.jsonl"
        path.unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        body = SEEN.format(path=str(path)).strip().replace("\n", "\n    ")
        config = make_config(
            write_reward(body),
            model=str(folder),
            data={"eval": {}},
            rollout={"max_new_tokens": 24, **rollout},
            training={"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 8},
        )
        train(config)
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


@pytest.mark.exhaustive
def test_they_are_hidden_or_shown_but_the_stop(
    seen: Callable[..., list[tuple[str, list[int]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = seen()
    said = capsys.readouterr().out
    assert 'completions without special tokens (rollout.special_tokens = "hide")' in said
    assert said.count("hold a special token, such as ','") == 1
    assert 'rollout.special_tokens = "show" shows them' in said
    shown = seen(special_tokens="show")
    said = capsys.readouterr().out
    assert 'with special tokens (rollout.special_tokens = "show")' in said
    assert "hold a special token" not in said
    assert [ids for _, ids in shown] == [ids for _, ids in hidden]
    for (text, ids), (other, _) in zip(shown, hidden, strict=True):
        assert text.count(",") == ids.count(COMMA) and text.replace(",", "") == other
        assert "<eos>" not in text
    assert any(COMMA in ids for _, ids in shown)


def completions(folder: Path, **rollout: Any) -> list[Completion]:
    settings = GenerationConfig.model_validate(
        {"precision": "fp8", "rollout": {"max_new_tokens": 24, **rollout}}
    )
    (group,) = rollout_folder(folder, ["3+8+2+9="], settings, samples=24)
    return group.completions


def test_stop_strings_read_what_is_shown(folder: Path) -> None:
    hidden = completions(folder, stop_strings=[","])
    shown = completions(folder, stop_strings=[","], special_tokens="show")
    assert any(COMMA in one.token_ids for one in hidden)
    for one, other in zip(hidden, shown, strict=True):
        ids = one.token_ids
        end = ids.index(COMMA) + 1 if COMMA in ids else len(ids)
        assert other.token_ids == ids[:end] and "," not in other.text
        assert one.text.startswith(other.text)


@pytest.mark.exhaustive
def test_they_are_shown_by_themselves_where_gpt_oss_has_its_channels(
    make_config: Callable[..., RunConfig], folder: Path
) -> None:
    template = (
        "{# <|channel|> %s #}{{ bos_token }}{%% for m in messages %%}{{ m.content }}{%% endfor %%}"
    )
    seen = []
    for mark in ("", "<|call|>"):
        (folder / "chat_template.jinja").write_text(template % mark)
        texts = [one.text for one in completions(folder)]
        said = read_rl(resolve(make_config(model=str(folder)))).learning
        seen.append((any("," in one for one in texts), [one for one in said if "special" in one]))
        assert not any("," in one.text for one in completions(folder, special_tokens="hide"))
    (is_plain_shown, [plain]), (is_shown, [shown]) = seen
    assert (is_plain_shown, is_shown) == (False, True)
    assert 'without special tokens (rollout.special_tokens = "hide")' in plain
    assert 'with special tokens (rollout.special_tokens = "show")' in shown


def test_a_further_stop_token_ends_a_completion(folder: Path) -> None:
    made = completions(folder, stop_tokens=[","])
    ended = [one for one in made if one.token_ids[-1] == COMMA]
    assert ended and all(one.finish_reason == "stop" for one in ended)
    assert not any(COMMA in one.token_ids[:-1] for one in made)
    assert not any("," in one.text for one in completions(folder, stop_tokens=[","]))


def test_an_unknown_stop_token_is_refused_before_the_run(
    make_config: Callable[..., RunConfig], folder: Path
) -> None:
    config = make_config(model=str(folder), rollout={"stop_tokens": ["<|im_end|>"]})
    with pytest.raises(ConfigError, match=r"rollout\.stop_tokens names .* which is no"):
        read_rl(resolve(config))


def test_an_end_of_turn_that_ends_nothing_is_named_before_the_run(
    make_config: Callable[..., RunConfig], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ ',' if m.role == 'assistant' }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    (line,) = [
        one for one in read_rl(resolve(make_config(model=str(folder)))).learning if "turn" in one
    ]
    assert line.startswith("warning: the chat template ends the assistant's turn with ','")
    settings = GenerationConfig.model_validate({"rollout": {"max_new_tokens": 4}})
    rollout_folder(folder, ["1+2="], settings)
    assert "ends the assistant's turn with ','" in "".join(capsys.readouterr())
    stopped = make_config(model=str(folder), rollout={"max_new_tokens": 4, "stop_tokens": [","]})
    assert not [one for one in read_rl(resolve(stopped)).learning if "turn" in one]


def test_the_rows_that_are_left_out_are_told_and_recorded(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    train(config)
    assert "vocabulary: 99 tokens of the tokenizer; 29 further rows" in capsys.readouterr().out
    manifest = json.loads((config.output / "run.json").read_text())
    assert manifest["model"]["config"]["tokenizer_size"] == 99
    assert manifest["inputs"]["model.tokens"] == "the first 99"
    (saved,) = (config.output / "checkpoints").glob("*/manifest.json")
    assert json.loads(saved.read_text())["inputs"]["model.tokens"] == "the first 99"
