"""Figures by documented names, in JSONL and TensorBoard."""

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isobit.observe.metrics import MetricsWriter, length_metrics, reward_metrics
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


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
