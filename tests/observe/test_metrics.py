"""Figures by documented names, in JSONL and TensorBoard.

Weights & Biases through a module that stands in for its package.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.tables import TrackingConfig
from isobit.observe.evaluation import length_metrics, reward_metrics
from isobit.observe.metrics import MetricsWriter, open_tracker
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.util.errors import ConfigError


def group(rewards: list[float | None], lengths: list[int]) -> Group:
    completions = [
        Completion(TokenSequence.of_answer((1,), (5,) * n), "", "length" if n == 4 else "stop")
        for n in lengths
    ]
    return Group(Prompt("set/0", "", (1, 2, 3)), 0, completions, rewards)


GROUPS = [group([1.0, None], [2, 4]), group([0.0, 0.5], [1, 1])]


def test_rewards_leave_out_those_that_failed() -> None:
    assert reward_metrics(GROUPS) == pytest.approx(
        {"reward/mean": 0.5, "reward/std": math.sqrt(1 / 6)}
    )


def test_lengths_are_of_all_completions() -> None:
    assert length_metrics(GROUPS) == {
        "response_length/mean": 2.0,
        "response_length/max": 4,
        "response_length/truncated": 0.25,
    }


def test_a_line_and_an_event_a_figure_are_there_once_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        for write in writer.writes(3, {"loss": 0.5, "grad_norm": math.nan}):
            write()
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
            "step": 3,
            "loss": 0.5,
            "grad_norm": None,
        }
        for write in writer.writes(4, {"loss": 0.25}):
            write()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]


MakeConfig = Callable[..., RunConfig]


class FakeWandb(SimpleNamespace):
    """Records what is sent to it."""

    def __init__(self) -> None:
        super().__init__(started=[], sent=[], exit_codes=[], refusal=None)

    def login(self) -> bool:
        if self.refusal:
            raise RuntimeError(self.refusal)
        return True

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        return SimpleNamespace(
            log=lambda metrics, step: self.sent.append((step, metrics)), finish=self.finish
        )

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def test_a_run_sends_every_figure_that_it_writes(wandb: FakeWandb, make_config: MakeConfig) -> None:
    config = make_config(tracking={"wandb": True})
    train(config)
    (started,) = wandb.started
    assert (started["project"], started["name"], started["config"]) == (
        "isobit",
        "run",
        config.model_dump(mode="json"),
    )
    assert [step for step, _ in wandb.sent] == [0, 1, 2, 2]
    assert "eval/held_out/accuracy" in wandb.sent[0][1] and "reward/mean" in wandb.sent[1][1]
    assert wandb.exit_codes == [0]


def test_supervised_runs_send_theirs_too(
    wandb: FakeWandb, tiny_folder: Path, tmp_path: Path
) -> None:
    train_set = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    training = {"steps": 2, "prompts_per_step": 2}
    config = {
        "model": str(tiny_folder),
        "output": tmp_path / "sft",
        "data": {"train": train_set},
        "training": training,
    }
    sft(SftConfig.model_validate(config | {"tracking": {"wandb": "sums"}}))
    assert [step for step, metrics in wandb.sent if "loss" in metrics] == [1, 2]


def test_a_run_that_fails_says_so_there(
    wandb: FakeWandb, make_config: MakeConfig, write_reward: Callable[[str], str]
) -> None:
    config = make_config(
        write_reward("return 1 / 0"), data={"eval": {}}, tracking={"wandb": "sums"}
    )
    with pytest.raises(Exception, match="ZeroDivisionError"):
        train(config)
    assert wandb.started[0]["project"] == "sums" and wandb.exit_codes == [1]


def test_a_resumed_run_goes_on_under_its_id(wandb: FakeWandb, tmp_path: Path) -> None:
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert open_tracker(TrackingConfig(wandb=True), tmp_path / name, {}) is not None
    first, again, other = (started["id"] for started in wandb.started)
    assert first == again != other
    assert all(started["resume"] == "allow" for started in wandb.started)


def test_a_missing_package_is_said_before_anything_is_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    config = make_config(tracking={"wandb": True})
    with pytest.raises(ConfigError, match="pip install wandb"):
        train(config)
    assert not config.output.exists() or not list(config.output.iterdir())


def test_a_login_that_fails_is_said_before_anything_is_written(
    wandb: FakeWandb, make_config: MakeConfig
) -> None:
    wandb.refusal = "No API key configured."
    config = make_config(tracking={"wandb": True})
    with pytest.raises(ConfigError, match=r"\(No API key configured\): run `wandb login`"):
        train(config)
    assert not config.output.exists() or not list(config.output.iterdir())


def test_without_the_setting_the_package_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    assert open_tracker(TrackingConfig(), tmp_path, {}) is None
