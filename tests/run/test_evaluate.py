"""Evaluation of a model folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config.run import RunConfig
from isobit.errors import ConfigError, RewardError
from isobit.rollout.progress import Progress
from isobit.run.evaluate import evaluate_folder

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
    results = evaluate_folder(tiny_folder, config, moments.append)
    assert {
        name: (result.problems, result.accuracy, result.samples) for name, result in results.items()
    } == {
        "a": (4, 0.5, 1),
        "b": (3, 0.5, 1),
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
