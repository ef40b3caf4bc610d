"""A chat template that writes the date, in runs that go on, and are done again, on another day."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from isobit.commands import evaluate
from isobit.commands.dry_run import plan_training
from isobit.commands.evaluate import evaluate_folder
from isobit.commands.replay import replay
from isobit.commands.rollout import rollout_folder
from isobit.config.commands import GenerationConfig
from isobit.config.recipes import RunConfig
from isobit.config.reward import RewardConfig
from isobit.config.rollout import RolloutConfig
from isobit.run import resolved
from isobit.run.loop import train
from isobit.run.resolved import as_begun, resolve
from isobit.run.rl_run import read_rl
from isobit.util.errors import ConfigError, ModelError
from tests.commands.test_replay import REWARD, settings
from tests.tiny import json_lines

TEMPLATE = (
    "{{ strftime_now('%d%m%Y %H') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
FIRST, NEXT = datetime(2026, 2, 28, 23, 59, 58), datetime(2026, 3, 1, 0, 0, 7)


class Clock:
    def __init__(self) -> None:
        self.time = FIRST

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(resolved, "now", clock)
    return clock


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    return tmp_path / "model"


def recipe(model: Path, output: Path, steps: int, **sections: Any) -> RunConfig:
    more = {"checkpoint": {"every": 1, "keep_last": 2}, "evaluation": {"every": 1}}
    return settings(model.parent, model, output, training={"steps": steps}, **more, **sections)


def date_of(output: Path) -> str | None:
    return json.loads((output / "run.json").read_text())["config"]["data"]["date"]


@pytest.mark.exhaustive
def test_a_run_keeps_its_date_when_it_goes_on_the_next_day(
    model: Path, tmp_path: Path, clock: Clock
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(recipe(model, whole, 3))
    train(recipe(model, parted, 1))
    clock.time = NEXT
    train(recipe(model, parted, 2), resume=True)
    (parted / "run.json").unlink()  # then the checkpoint says it
    train(recipe(model, parted, 3), resume=True)
    for name in ("digests.jsonl", "rewards.jsonl"):
        assert (whole / name).read_bytes() == (parted / name).read_bytes()
    assert date_of(whole) == date_of(parted) == FIRST.isoformat()
    assert "28022026 23" in json_lines(whole / "completions.jsonl")[0]["prompt"]
    assert replay(whole, say=lambda _: None).equal
    assert not replay(whole, say=lambda _: None).differences
    with pytest.raises(ConfigError, match=r"data.date: '2026-02-28T23:59:58' in the run"):
        train(recipe(model, parted, 4, data={"date": "2026-03-01"}), resume=True)


def test_a_new_run_has_todays_date_or_the_one_that_is_set(
    model: Path, tmp_path: Path, clock: Clock
) -> None:
    clock.time = NEXT
    config = recipe(model, tmp_path / "out", 1)
    assert as_begun(resolve(config), resume=True).config.data.date == NEXT
    again = recipe(model, tmp_path / "out", 1, data={"date": "2024-07-26"})
    plan = plan_training(again, read_rl)
    assert "2024-07-26" in "\n".join(plan.plan.learning)
    assert plan.plan.data.prompts[0].text.startswith("26072024 00")


def test_a_template_without_a_clock_leaves_no_date(
    tiny_folder: Path, model: Path, tmp_path: Path
) -> None:
    config = recipe(model, tmp_path / "out", 1)
    other = config.model_copy(update={"model": str(tiny_folder)})
    assert as_begun(resolve(other), False).config == other
    off = recipe(model, tmp_path / "out", 1, data={"chat": False})
    assert as_begun(resolve(off), False).config == off


def test_outside_of_a_run_the_date_is_todays_and_said(
    model: Path, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = GenerationConfig(rollout=RolloutConfig(max_new_tokens=2))
    (group,) = rollout_folder(model, ["1+1"], settings)
    assert group.prompt.text == "28022026 231+1="
    assert (
        "reads the date, which is 2026-02-28 23:59:58 here (data.date)" in capsys.readouterr().err
    )
    evaluate_folder(model, recipe(model, tmp_path / "out", 1))
    assert "2026-02-28 23:59:58" in capsys.readouterr().err


def test_a_reward_model_has_one_date_in_an_evaluation_too(
    tiny_folder: Path, model: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy's own template writes none."""
    reward = RewardConfig(model=str(model))
    config = recipe(model, tmp_path / "out", 1).model_copy(update={"reward": reward})
    dates = list[Any]()

    def load(reward: Any, folders: Any, device: Any, date: Any) -> Any:
        dates.append(date)
        raise ModelError("seen")

    monkeypatch.setattr(evaluate, "ModelRewards", load)
    with pytest.raises(ModelError, match="seen"):
        evaluate_folder(tiny_folder, config)
    assert dates == [FIRST]
