"""Completions of a model folder without a reward."""

import json
from pathlib import Path

import pytest

from isobit.config.commands import GenerationConfig
from isobit.config.data import JsonlData
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.errors import ConfigError, DataError
from isobit.run.rollout import completion_lines, rollout_folder

PRECISION = PrecisionConfig(preset="fp8")
SETTINGS = GenerationConfig(precision=PRECISION, rollout=RolloutConfig(max_new_tokens=6))


def test_texts_are_completed_in_order(tiny_folder: Path) -> None:
    groups = rollout_folder(tiny_folder, ["1+2=", "3+4="], SETTINGS, samples=2)
    assert [group.prompt.text for group in groups] == ["1+2=", "3+4="]
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == 4
    assert all(
        len(completion.token_ids) == len(completion.log_probs) <= 6 for completion in completions
    )
    again = rollout_folder(tiny_folder, ["1+2=", "3+4="], SETTINGS, samples=2)
    assert [group.completions for group in again] == [group.completions for group in groups]


def test_a_files_rows_keep_their_columns(tiny_folder: Path) -> None:
    groups = rollout_folder(
        tiny_folder, JsonlData(path=Path("starter:train.jsonl"), limit=2), SETTINGS
    )
    records = [json.loads(line) for group in groups for line in completion_lines(group)]
    assert [record["columns"]["answer"] for record in records] == [
        str(sum(map(int, r["prompt"][:-1].split("+")))) for r in records
    ]
    assert records[0]["log_probs"] == list(groups[0].completions[0].log_probs), (
        "floats survive as they are"
    )


def test_a_completion_ends_at_the_context(tiny_folder: Path) -> None:
    greedy = GenerationConfig(
        precision=PRECISION, rollout=RolloutConfig(max_new_tokens=100, temperature=0.0)
    )
    (group,) = rollout_folder(tiny_folder, ["1" * 250], greedy)
    assert len(group.prompt.token_ids) + len(group.completions[0].token_ids) <= 256


def test_what_cannot_be_completed(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"samples is 3, but rollout.temperature is 0"):
        rollout_folder(
            tiny_folder,
            ["1"],
            GenerationConfig(precision=PRECISION, rollout=RolloutConfig(temperature=0.0)),
            samples=3,
        )
    with pytest.raises(DataError, match="no room in the model's context of 256"):
        rollout_folder(tiny_folder, ["1" * 300], SETTINGS)
