"""A run whose engine and trainer take turns leaves what any other run leaves, and says what each turn took."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.schema import RunConfig
from isobit.config.sft import SftConfig
from isobit.run import loop
from isobit.run.gpu_memory import GpuPlan
from isobit.run.loop import train
from isobit.run.setup import Run, prepare
from isobit.run.sft import loop as sft_loop
from isobit.run.sft.setup import SftRun, prepare_sft
from isobit.run.turns import GpuTurns

MakeConfig = Callable[..., RunConfig]
GIB = 1 << 30
PLAN = GpuPlan({"masters": 2 * GIB, "KV pages": 3 * GIB}, {"masters": 2 * GIB, "gradients": 2 * GIB}, 10 * GIB, 40, 4096, 0)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs on the CPU that take turns as on a GPU, with what happened to torch's allocator."""
    events: list[str] = []
    peaks = iter(range(1, 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks) * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))

    def with_turns(config: RunConfig) -> Run:
        run = prepare(config)
        return replace(run, turns=GpuTurns(PLAN, run.engine, run.trainer))

    def sft_with_turns(config: SftConfig) -> SftRun:
        run = prepare_sft(config)
        return replace(run, turns=GpuTurns(PLAN, run.evaluator.engine if run.evaluator else None, run.trainer))

    monkeypatch.setattr(loop, "prepare", with_turns)
    monkeypatch.setattr(sft_loop, "prepare_sft", sft_with_turns)
    return events


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def content(root: Path) -> dict[str, bytes]:
    names = ("model/model.safetensors", "completions.jsonl", "checkpoints/step_000002/optimiser.safetensors")
    return {name: (root / name).read_bytes() for name in names}


@pytest.mark.parametrize("offload", [False, True])
def test_turns_change_no_bit(
    offload: bool, make_config: MakeConfig, turns: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"offload_moments": offload}
    turning = train(make_config(output=tmp_path / "turning", training=training, evaluation={"every": 1}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", prepare)
        plain = train(make_config(output=tmp_path / "plain", training=training, evaluation={"every": 1}))
    assert content(tmp_path / "turning") == content(tmp_path / "plain")
    assert turns == ["reset", "empty", "reset"] * 3, "one turn to begin, and one a step"
    steps = [line for line in lines(tmp_path / "turning") if "loss" in line]
    assert [(line["memory/rollout_peak_gib"], line["memory/training_peak_gib"]) for line in steps] == [(3.0, 4.0), (5.0, 6.0)]
    assert all(("time/offload_s" in line) == offload for line in steps)
    assert not any(name.startswith("memory/") for line in lines(tmp_path / "plain") for name in line)
    written = json.loads((tmp_path / "turning" / "summary.json").read_text())["gpu_memory"]
    assert written == {"rollout": {"planned_gib": 5.0, "peak_gib": 5.0}, "training": {"planned_gib": 4.0, "peak_gib": 6.0}}
    assert plain.gpu_memory is None and turning.gpu_memory is not None
    printed = capsys.readouterr().out
    assert "GPU memory, of 10 GiB" in printed
    assert "GPU memory in training: 6.0 GiB at most, 4.0 planned" in printed


def test_a_resumed_run_takes_turns_from_its_first_moment(
    make_config: MakeConfig, turns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"training": {"offload_moments": True}, "checkpoint": {"every": 1}}
    train(make_config(output=tmp_path / "whole", **settings))

    def break_off(_: RunConfig, step: int) -> bool:
        if step == 2:
            raise KeyboardInterrupt  # not an Exception: nothing more is saved
        return step == 0

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluation_is_due", break_off)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(output=tmp_path / "broken", **settings))
    turns.clear()
    train(make_config(output=tmp_path / "broken", **settings), resume=True)
    assert turns == ["reset", "empty", "reset"] * 2, "the checkpoint is read in a turn of the trainer"
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_fine_tuning_takes_turns_too(make_config: MakeConfig, turns: list[str], tmp_path: Path) -> None:
    examples = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    supervised = {
        "model": make_config().model,
        "output": tmp_path / "sft",
        "data": {"train": examples, "eval": {"held_out": examples | {"path": "starter:held_out.jsonl"}}},
        "reward": {"function": "isobit.starter.tasks:correct_answer"},
        "rollout": {"max_new_tokens": 8},
        "training": {"steps": 2, "prompts_per_step": 2, "offload_moments": True},
    }
    sft_loop.sft(SftConfig.model_validate(supervised))
    assert turns == ["reset", "empty", "reset"] * 2
    steps = [line for line in lines(tmp_path / "sft") if "loss" in line]
    assert [line["memory/training_peak_gib"] for line in steps] == [2.0, 4.0]
    assert all(line["time/offload_s"] >= 0 for line in steps)
