"""``async.max_staleness`` with an environment: episodes stay open while steps learn."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.data.tool_calls import ToolCall
from isobit.environments.pool import Environments
from isobit.models.safetensors import TensorFile
from isobit.observe.console import silent
from isobit.records.wire import completions_of
from isobit.rollout import episodes
from isobit.rollout.shared_groups import SharedGroups
from isobit.run.loop import train
from isobit.run.pending import value_of
from isobit.util.errors import ConfigError
from tests.run import acting
from tests.run.test_environment import HELD_OUT, STOPS, TOOLS
from tests.run.test_free_batches import Hurried, check_bounds, left_by, schedule_of
from tests.run.test_lag import Killed, die_after_saving, steps_of
from tests.tiny import json_lines
from tests.worlds import in_world

MakeConfig = Callable[..., RunConfig]
STEPS = 5


@pytest.fixture
def free_acting(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """Few places, so that episodes of a group begin and end apart."""
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))

    def make(max_staleness: int | None, name: str = "Counter", **sections: Any) -> RunConfig:
        given: dict[str, Any] = {
            "environment": {"class": f"{TOOLS}:{name}", "max_turns": 6},
            "rollout": {"max_new_tokens": 40, "stop_tokens": STOPS, "max_sequences": 7},
            "training": {"steps": STEPS, "learning_rate": 1e-2},
            "checkpoint": {"every": 1, "keep_last": 9},
            "data": {"eval": {"held_out": {**HELD_OUT, "limit": 2}}},
            "evaluation": {"every": 2},
            "async": {"max_staleness": max_staleness},
            "tracking": {"completions": "all"},
        }
        reward = "isobit.starter.tasks:correct_answer" if name == "Speaks" else "environment"
        return make_config(reward, **{**given, **sections})

    return make


def left_with_answers(root: Path) -> dict[str, Any]:
    return {**left_by(root), "answers": (root / "environment.jsonl").read_bytes()}


def open_samples(root: Path, step: int) -> list[Any]:
    path = root / "checkpoints" / f"step_{step:06}" / "open_groups.safetensors"
    tensors = TensorFile(path)
    if "samples" not in tensors:
        return []
    return completions_of(value_of(tensors["samples"]))


@pytest.mark.parametrize("name", ["Counter", "Paced", "Speaks"])
def test_without_staleness_it_is_the_synchronous_run(
    name: str, free_acting: MakeConfig, tmp_path: Path
) -> None:
    synchronous = free_acting(None, name, output=tmp_path / "synchronous")
    train(synchronous, silent())
    config = free_acting(0, name, output=tmp_path / "free")
    train(config, silent())
    assert left_with_answers(config.output) == left_with_answers(synchronous.output)
    assert [line["drawn"] for line in schedule_of(config.output)] == [[]] * STEPS


def test_episodes_go_on_with_other_weights_and_are_replayed(
    free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = free_acting(2)
    summary = train(config, silent())
    assert summary.tokens_differing == 0 < summary.tokens_compared
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    steps = steps_of(config.output)
    assert any(line["staleness/mean"] % 1 for line in steps), (
        "an episode has tokens of two versions"
    )
    assert any(
        len(one.sequence.turn_lengths) > 1
        for step in range(1, STEPS)
        for one in open_samples(config.output, step)
        if one.finish_reason == "aborted"
    ), "an episode is carried over in a later turn"
    assert replay(config.output, say=lambda _: None).differences == []

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was asked")

    monkeypatch.setattr(Environments, "ask", refuse)
    for step in (None, 3):
        again = replay(config.output, step, say=lambda _: None, recorded_rewards=True)
        assert again.differences == []
