"""Evaluation of a model folder.

Completions of a model folder without a reward.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from isobit.commands.evaluate import evaluate_folder
from isobit.commands.rollout import completion_lines, rollout_folder
from isobit.config.commands import GenerationConfig
from isobit.config.data import JsonlData
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.records.text import Group
from isobit.rollout.engine_stats import Progress
from isobit.util.errors import ConfigError, DataError, RewardError

MakeConfig = Callable[..., RunConfig]
SETS = {
    "eval": {
        "a": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 4},
        "b": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 3},
    }
}


def test_every_named_set_is_measured_greedily(
    make_config: MakeConfig, write_reward: Callable[[str], str], tiny_folder: Path
) -> None:
    config = make_config(write_reward("return float(prompt.row['answer'] != '') / 2"), data=SETS)
    moments: list[Progress] = []
    taken = dict[str, Sequence[Group]]()
    results = evaluate_folder(tiny_folder, config, moments.append, take=taken.__setitem__)
    assert {
        name: (result.problems, result.accuracy, result.samples) for name, result in results.items()
    } == {"a": (4, 0.5, 1), "b": (3, 0.5, 1)}
    assert {name: [group.rewards for group in groups] for name, groups in taken.items()} == {
        "a": [[0.5]] * 4,
        "b": [[0.5]] * 3,
    }
    assert moments[-1].finished == moments[-1].total == 3
    assert not config.output.exists()


def test_several_samples_differ_and_repeat(
    make_config: MakeConfig, write_reward: Callable[[str], str], tiny_folder: Path
) -> None:
    config = make_config(
        write_reward("return float(completion.token_ids[0] % 2)"),
        data=SETS,
        evaluation={"temperature": 1.0, "samples": 8, "max_new_tokens": 2},
    )
    first, second = evaluate_folder(tiny_folder, config), evaluate_folder(tiny_folder, config)
    assert first == second
    result = first["a"]
    assert 0 < result.accuracy < 1, "samples of one problem are drawn with noise of their own"
    assert result.pass_at[1] == pytest.approx(result.accuracy)
    assert list(result.pass_at) == [1, 2, 4, 8]
    assert result.response_length <= 2


def test_what_cannot_be_evaluated(
    make_config: MakeConfig, write_reward: Callable[[str], str], tiny_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"data.eval names no set"):
        evaluate_folder(tiny_folder, make_config(data={"eval": {}}))
    with pytest.raises(RewardError, match=r"5 of 5 rewards failed.*ValueError: no"):
        evaluate_folder(tiny_folder, make_config(write_reward("raise ValueError('no')")))


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
