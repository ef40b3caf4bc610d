"""Runs without a clip, and with a learning rate by the effective sample size."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from tests.run.test_lag import REWARD, outcome, steps_of

STEPS, RATE = 4, 1e-2


@pytest.fixture
def lagging(
    make_config: Callable[..., RunConfig], write_reward: Callable[[str], str]
) -> Callable[..., RunConfig]:
    """Steps of one update, with a checkpoint after each."""

    def make(output: Path, lag: int, clip: str, **training: Any) -> RunConfig:
        return make_config(
            write_reward(REWARD),
            output=output,
            algorithm={"clip": clip},
            training={"steps": STEPS, "learning_rate": RATE, **training},
            checkpoint={"every": 1, "keep_last": STEPS},
            rollout={"max_new_tokens": 4},
            **{"async": {"lag": lag}},
        )

    return make


def test_a_rate_by_the_sample_size_is_the_same_after_resuming(
    lagging: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = lagging(tmp_path / "run", 2, "none", rate_by_ess=True)
    train(config)
    expected, steps = outcome(config.output), steps_of(config.output)
    for step in steps:
        share = step["ratio/effective_sequences"]
        assert step["learning_rate"] == RATE * share**0.5
        assert (share < 1) == (step["staleness/mean"] > 0)
        assert not any(name.startswith("clip_fraction") for name in step)
    for number in (3, 4):
        shutil.rmtree(config.output / "checkpoints" / f"step_{number:06}")
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_without_a_lag_no_byte_depends_on_the_clip(
    lagging: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """In one update of samples of its own the ratio is 1, and nothing would be clipped."""
    found = []
    for clip in ("ratio", "none"):
        config = lagging(tmp_path / clip, 0, clip, steps=2)
        train(config)
        files = outcome(config.output)
        metrics = [
            {name: value for name, value in line.items() if not name.startswith("clip_fraction")}
            for line in files.pop("metrics")
        ]
        found.append((files, metrics))
        sizes = {line["ratio/effective_sample_size"] for line in steps_of(config.output)}
        assert sizes == {1.0}
    assert any(name.endswith(".safetensors") for name in found[0][0])
    assert found[0] == found[1]
