"""A run whose engine and trainer take turns leaves what any other run leaves, and says what each
turn took.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.training import TrainingConfig
from isobit.memory.device import DevicePlan
from isobit.memory.host import microbatch_tokens
from isobit.memory.sharing import DeviceSharing, PhaseMemory
from isobit.records.batch import PackedBatch
from isobit.rewards.grading import grade
from isobit.rollout import native
from isobit.rollout.native import NativeEngine
from isobit.run import loop, model_source, plan, run, sft_objectives
from isobit.run import sft as sft_loop
from isobit.run.loop import train
from isobit.run.plan import Plan
from isobit.run.resolved import resolve
from isobit.run.rl_run import prepare_rl
from isobit.run.run import Run
from isobit.run.sft import prepare_sft
from isobit.starter.tasks import correct_answer
from isobit.training.supervised import mean_loss
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError, StoppedAtOnce

MakeConfig = Callable[..., RunConfig]
GIB = 1 << 30
PLAN = DevicePlan(
    {"masters": 2 * GIB, "KV pages": 3 * GIB},
    {"masters": 2 * GIB, "gradients": 2 * GIB},
    10 * GIB,
    pages=40,
    page_tokens=128,
    tokens=4096,
    host={},
    processes=1,
)


TURN = ["empty", "reset", "empty", "reset"]
"""Of the trainer: the engine gives its memory back, and at the end the trainer."""


@pytest.fixture
def turns(own_memory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs on the CPU that take turns as on a GPU, with what happened to the memory."""
    events: list[str] = []

    def with_turns(run: Run[Any, Any]) -> Any:
        own_memory().events = events
        run.turns = DeviceSharing(PLAN, run._engine, run.trainer)
        return run

    monkeypatch.setattr(loop, "prepare_rl", lambda *given: with_turns(prepare_rl(*given)))
    monkeypatch.setattr(sft_loop, "prepare_sft", lambda *given: with_turns(prepare_sft(*given)))
    return events


def lines(root: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def content(root: Path) -> dict[str, bytes]:
    names = (
        "model/model.safetensors",
        "completions.jsonl",
        "checkpoints/step_000002/optimiser.safetensors",
    )
    return {name: (root / name).read_bytes() for name in names}


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [False, True])
def test_turns_change_no_bit(
    offload: bool,
    make_config: MakeConfig,
    turns: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training = {"offload_moments": offload}
    turning = train(
        make_config(output=tmp_path / "turning", training=training, evaluation={"every": 1})
    )
    assert turns == TURN * 3, "one turn to begin, and one a step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare_rl", prepare_rl)
        plain = train(
            make_config(output=tmp_path / "plain", training=training, evaluation={"every": 1})
        )
    assert content(tmp_path / "turning") == content(tmp_path / "plain")
    steps = [line for line in lines(tmp_path / "turning") if "loss" in line]
    assert [
        (line["memory/rollout_peak_gib"], line["memory/training_peak_gib"]) for line in steps
    ] == [(3.0, 4.0), (5.0, 6.0)]
    assert all(("time/offload_s" in line) == offload for line in steps)
    assert not any(
        name.startswith("memory/") for line in lines(tmp_path / "plain") for name in line
    )
    written = json.loads((tmp_path / "turning" / "summary.json").read_text())["gpu_memory"]
    assert written == {
        "rollout": {"planned_gib": 5.0, "peak_gib": 7.0},
        "training": {"planned_gib": 4.0, "peak_gib": 6.0},
    }
    assert plain.gpu_memory is None and turning.gpu_memory is not None
    printed = capsys.readouterr().out
    assert "device memory, of 10 GiB" in printed
    assert "device memory in training: 6.0 GiB at most, 4.0 planned" in printed
    assert "device memory in rollout: 7.0 GiB at most, 5.0 planned" in printed, (
        "the evaluation after the last training counts"
    )


def test_a_resumed_run_takes_turns_from_its_first_moment(
    make_config: MakeConfig, turns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "training": {"offload_moments": True},
        "checkpoint": {"every": 1},
        "rollout": {"max_new_tokens": 8, "kv_pages": 40},
    }
    train(make_config(output=tmp_path / "whole", **settings))

    def break_off(_: RunConfig, step: int) -> bool:
        if step == 2:
            raise StoppedAtOnce  # nothing more is saved
        return step == 0

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluation_is_due", break_off)
        with pytest.raises(StoppedAtOnce):
            train(make_config(output=tmp_path / "broken", **settings))
    turns.clear()
    train(make_config(output=tmp_path / "broken", **settings), resume=True)
    assert turns == TURN * 2, "the checkpoint is read in a turn of the trainer"
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_an_engine_that_stays_gives_nothing_back_and_changes_no_bit(
    make_config: MakeConfig, turns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It captures once, and its cache is among what training takes."""
    made: list[object] = []
    make_runner = native._default_runner
    monkeypatch.setattr(
        native, "_default_runner", lambda *a, **k: made.append(1) or make_runner(*a, **k)
    )
    staying = {**PLAN.training, "KV pages": PLAN.rollout["KV pages"]}
    monkeypatch.setitem(globals(), "PLAN", replace(PLAN, training=staying))
    settings: dict[str, Any] = {"evaluation": {"every": 1}}
    summary = train(make_config(output=tmp_path / "staying", **settings))
    assert turns == ["reset", "reset"] * 3 and len(made) == 1
    monkeypatch.setattr(loop, "prepare_rl", prepare_rl)
    train(make_config(output=tmp_path / "plain", **settings))
    assert content(tmp_path / "staying") == content(tmp_path / "plain")
    assert summary.gpu_memory is not None
    assert summary.gpu_memory["training"].planned_gib == 7.0


def supervised(make_config: MakeConfig, **sections: Any) -> SftConfig:
    """A few examples of sums, whose completions are graded, too."""
    base = make_config()
    examples = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    config = {
        "model": base.model,
        "output": base.output,
        "data": {
            "train": examples,
            "eval": {"held_out": examples | {"path": "starter:held_out.jsonl"}},
        },
        "reward": {"function": "isobit.starter.tasks:correct_answer"},
        "rollout": {"max_new_tokens": 8},
    }
    return SftConfig.model_validate(config | sections)


def test_fine_tuning_takes_turns_too(
    make_config: MakeConfig, turns: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"steps": 3, "prompts_per_step": 2, "offload_moments": True}
    config = supervised(make_config, training=training, evaluation={"every": 2})
    summary = sft_loop.sft(config)
    released, once = TURN[0], TURN[1:]
    assert turns == [*TURN, released, "reset", "reset", *once, released, *once, released], (
        "one turn to begin; between steps without an evaluation nothing is moved or given back"
    )
    steps = [line for line in lines(config.output) if "loss" in line]
    peaks = [(line["memory/rollout_peak_gib"], line["memory/training_peak_gib"]) for line in steps]
    assert peaks == [(3.0, 4.0), (3.0, 5.0), (6.0, 7.0)]
    assert all(line["time/offload_s"] >= 0 for line in steps)
    memory = {"rollout": PhaseMemory(5.0, 8.0), "training": PhaseMemory(4.0, 7.0)}
    assert summary.gpu_memory == memory
    written = json.loads((config.output / "summary.json").read_text())["gpu_memory"]
    assert written == {name: asdict(part) for name, part in memory.items()}
    printed = capsys.readouterr().out
    assert "device memory in rollout: 8.0 GiB at most, 5.0 planned" in printed
    assert "device memory in training: 7.0 GiB at most, 4.0 planned" in printed


def test_without_an_engine_all_memory_is_the_trainers(
    make_config: MakeConfig, turns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised(
        make_config,
        reward=None,
        training={"steps": 2, "prompts_per_step": 2},
        evaluation={"every": 1},
    )
    monkeypatch.setitem(globals(), "PLAN", replace(PLAN, rollout={}))
    summary = sft_loop.sft(config)
    steps = [line for line in lines(config.output) if "loss" in line]
    assert [
        {name: line[name] for name in line if name.startswith("memory/")} for line in steps
    ] == [{"memory/training_peak_gib": 4.0}, {"memory/training_peak_gib": 6.0}]
    assert summary.gpu_memory == {"training": PhaseMemory(4.0, 7.0)}, (
        "the loss of held-out examples after the last step"
    )


def test_held_out_losses_are_measured_without_the_cache(
    make_config: MakeConfig, turns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised(
        make_config, evaluation={"every": 1}, training={"steps": 1, "prompts_per_step": 2}
    )
    run = sft_loop.prepare_sft(resolve(config))
    assert run.evaluator is not None
    engine, held = run.evaluator.engine, []
    assert isinstance(engine, NativeEngine)

    def watched(trainer: Trainer, batches: Sequence[PackedBatch]) -> float:
        held.append(engine._executor.has_runner)
        return mean_loss(trainer, batches)

    monkeypatch.setattr(sft_objectives, "mean_loss", watched)
    graded = run.evaluate(None, partial(grade, reward=correct_answer))
    assert graded.keys() == {"held_out"}
    assert held == [False]


def test_fine_tuning_is_planned_before_weights_are_read(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has one completion a prompt, and a model that does not fit is refused while the GPU is
    empty.
    """
    asked: list[TrainingConfig] = []

    def refuse(plan: Plan[Any, Any], *_: object, **__: object) -> DevicePlan:
        asked.append(plan.training)
        raise ConfigError("no room")

    monkeypatch.setattr(plan, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(run, "plan_device_memory", refuse)
    monkeypatch.setattr(model_source, "read_masters", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="no room"):
        prepare_sft(resolve(supervised(make_config, training={"prompts_per_step": 2})))
    assert microbatch_tokens(asked[0], 100) == 200
