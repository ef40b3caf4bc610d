"""Runs that a reward model grades, alone and beside a function."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.dry_run import plan_training
from isobit.commands.replay import replay
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.run import loop as collecting
from isobit.run.loop import train
from isobit.run.reward_models import load_model_reward
from isobit.run.rl_run import read_rl
from isobit.util.errors import CheckpointError, ModelError
from tests.run.test_recorded_flow import as_recorded_before

MakeConfig = Callable[..., RunConfig]


def graded_by(config: RunConfig, **reward: Any) -> RunConfig:
    """The run with another table ``reward``."""
    tables = config.model_dump(exclude_unset=True)
    return RunConfig.model_validate(tables | {"reward": reward})


def learnt(output: Path) -> list[list[float]]:
    """The rewards of each step."""
    lines = [json.loads(line) for line in (output / "rewards.jsonl").open(encoding="utf-8")]
    return [line["rewards"] for line in lines if line["prompts"][0][0].startswith("train")]


def steps(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    return [line for line in lines if "loss" in line]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups of all steps, as they were learnt from."""
    found: list[Group] = []
    plain = collecting.rollout

    def sample(*arguments: Any) -> Any:
        made = plain(*arguments)
        found.extend(made.groups)
        return made

    monkeypatch.setattr(collecting, "rollout", sample)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
def test_rewards_are_its_scores_whoever_is_scored_beside(
    preset: str, make_config: MakeConfig, reward_folder: Path, seen: list[Group]
) -> None:
    config = graded_by(
        make_config(training={"samples_per_prompt": 4}),
        model=str(reward_folder),
        model_precision=preset,
    )
    summary = train(config)
    assert summary.tokens_differing == 0
    model = load_model_reward(reward_folder, PrecisionConfig.model_validate(preset))
    alone = [
        [model([(group.prompt, completion)])[0] for completion in group.completions]
        for group in seen
    ]
    assert [group.rewards for group in seen] == alone
    assert len({score for scores in alone for score in scores}) > 8
    assert all(line["reward/std"] > 0 for line in steps(config.output))


def test_it_stands_beside_a_function_with_a_weight(
    make_config: MakeConfig, reward_folder: Path, seen: list[Group]
) -> None:
    parts = {
        "liked": {"model": str(reward_folder), "weight": 0.5},
        "right": {"function": "isobit.starter.tasks:correct_answer", "weight": 2.0},
    }
    config = graded_by(make_config(), parts=parts)
    train(config)
    for group in seen:
        pairs = zip(group.reward_parts["liked"], group.reward_parts["right"], strict=True)
        for reward, (liked, right) in zip(group.rewards, pairs, strict=True):
            assert liked is not None
            assert right is not None
            assert reward == 0.5 * liked + 2.0 * right
    line = steps(config.output)[0]
    assert {"reward/liked/mean", "reward/liked/std", "reward/right/mean"} <= line.keys()


def test_a_folder_that_has_changed_meanwhile_is_refused(
    make_config: MakeConfig, reward_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    shutil.copytree(reward_folder, folder)
    train(graded_by(make_config(training={"steps": 1}), model=str(folder)))
    longer = graded_by(make_config(training={"steps": 2}), model=str(folder))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 0x40
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="are not those that this run was graded by"):
        train(longer, resume=True)
    shutil.copy(reward_folder / "model.safetensors", folder)
    assert train(longer, resume=True).steps == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("alone", [True, False])
def test_a_run_of_an_earlier_version_is_graded_in_fp8_to_its_end(
    make_config: MakeConfig, reward_folder: Path, tmp_path: Path, alone: bool
) -> None:
    """Its record names that flow, which its recipe left open."""

    def graded(steps: int, output: Path, **precision: str) -> RunConfig:
        model: dict[str, Any] = {"model": str(reward_folder), **precision}
        config = make_config(training={"steps": steps}, checkpoint={"every": 1}, output=output)
        return graded_by(config, **(model if alone else {"parts": {"liked": model}}))

    def as_before(table: dict[str, Any]) -> None:
        table["model_precision"] = "fp8"

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(graded(2, whole, model_precision="fp8"))
    train(graded(1, cut, model_precision="fp8"))
    as_recorded_before(cut, as_before, "reward")
    train(graded(2, cut), resume=True)
    assert learnt(cut) == learnt(whole)
    assert replay(cut, 2).differences == []
    train(graded(1, tmp_path / "now"))
    assert learnt(tmp_path / "now") != learnt(whole)[:1], "the two flows give other scores"


def test_one_precision_serves_all_parts_but_those_that_name_another() -> None:
    parts = {
        "first": {"model": "one"},
        "second": {"model": "two", "model_precision": "bf16"},
    }
    named = RewardConfig.model_validate({"model_precision": "fp8", "parts": parts}).named()
    assert [one.model_precision for one in named.values()] == ["fp8", "bf16"]


def test_a_plan_knows_it(make_config: MakeConfig, reward_folder: Path) -> None:
    config = graded_by(make_config(), model=str(reward_folder))
    plan = plan_training(config, read_rl)
    (frozen,) = plan.plan.frozen
    model = load_model_reward(reward_folder, PrecisionConfig())
    held = model.model.policy
    assert plan.memory.size("reward models") == held.num_bytes  # pyright: ignore[reportAttributeAccessIssue]
    assert frozen.shape.score_head


def test_a_policy_is_no_reward_model(make_config: MakeConfig, tiny_folder: Path) -> None:
    config = graded_by(make_config(), model=str(tiny_folder))
    with pytest.raises(ModelError, match="is a language model: it has no score"):
        train(config)
    assert not config.output.exists()


def test_an_empty_completion_has_a_score(reward_folder: Path) -> None:
    model = load_model_reward(reward_folder, PrecisionConfig(preset="bf16"))
    prompt = Prompt("p/0", "3+8=", (5, 6, 7))
    empty = Completion(TokenSequence.of_answer(prompt.token_ids, ()), "", "aborted")
    (score,) = model([(prompt, empty)])
    assert math.isfinite(score)
