"""Supervised runs of a few steps: what they leave behind, that they repeat and learn, and what is
refused before anything is written.
"""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from isobit.commands.dry_run import DryRun, plan_training
from isobit.config.load import build
from isobit.config.precision import Preset
from isobit.config.recipes import SftConfig
from isobit.config.training import OptimisationConfig
from isobit.kernels.backend import support
from isobit.kernels.spec.backend import SpecBackend
from isobit.memory.sharing import DeviceSharing
from isobit.models.folder import load_model, read_masters
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.records.batch import PackedBatch
from isobit.run import model_source, plan
from isobit.run import plan as plan_module
from isobit.run import run as run_module
from isobit.run.data import SftData
from isobit.run.resolved import resolve
from isobit.run.sft import prepare_sft, read_sft, sft
from isobit.starter.tasks import problems, question, worked_out
from isobit.training.trainer import Trainer
from isobit.util.errors import (
    ConfigError,
    DataError,
    Interrupted,
    IsobitError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    RewardError,
)
from tests.tiny import json_lines as lines
from tests.tiny import with_sections

MakeConfig = Callable[..., SftConfig]
REWARD = {"function": "isobit.starter.tasks:correct_answer", "in_process": True}
SCRATCH = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 1, "num_heads": 4}


def plan_sft(config: SftConfig) -> DryRun:
    return plan_training(config, read_sft)


def write_rows(path: Path, held_out: bool, count: int) -> Path:
    rows = (
        {"prompt": question(p), "completion": worked_out(p), "answer": str(sum(p))}
        for p in problems(held_out)[:count]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_config(tiny_folder: Path, tmp_path: Path) -> MakeConfig:
    """Two steps of 4 worked-out sums with a tiny random model; sections replace keys of these."""

    train = write_rows(tmp_path / "train.jsonl", held_out=False, count=12)
    held_out = write_rows(tmp_path / "held_out.jsonl", held_out=True, count=5)

    def make(**sections: Any) -> SftConfig:
        config: dict[str, Any] = {
            "model": str(tiny_folder),
            "output": tmp_path / "run",
            "data": {
                "train": {"type": "jsonl", "path": train},
                "eval": {"held_out": {"type": "jsonl", "path": held_out}},
            },
            "rollout": {"max_new_tokens": 8},
            "training": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
        }
        return build(SftConfig, with_sections(config, sections), "test")

    return make


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_learns(preset: str, make_config: MakeConfig) -> None:
    summary = sft(make_config(precision={"preset": preset}, training={"steps": 6}))
    assert summary.loss_before is not None and summary.loss_after is not None
    assert summary.loss_after < summary.loss_before - 0.1
    assert summary.accuracy_after is None, "no reward was configured"


def test_the_directory_holds_what_the_run_did(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(reward=REWARD, evaluation={"every": 1})
    summary = sft(config)
    root = config.output
    written = json.loads((root / "summary.json").read_text())
    assert (written["loss_after"], written["accuracy_after"]) == (
        summary.loss_after,
        summary.accuracy_after,
    )
    assert json.loads((root / "run.json").read_text())["config"] == config.model_dump(mode="json")
    figures = lines(root / "metrics.jsonl")
    assert [line["step"] for line in figures] == [0, 1, 1, 2, 2]
    assert figures[-1]["eval/held_out/loss"] == summary.loss_after
    names = {"loss", "grad_norm", "learning_rate", "entropy", "time/training_s"}
    assert names | {"tokens_per_s/training"} <= figures[1].keys()
    assert {line["source"] for line in lines(root / "completions.jsonl")} == {"held_out"}
    assert list((root / "tensorboard").iterdir())
    assert load_model(summary.model, config.precision).tokenizer("1+2=")["input_ids"]
    printed = capsys.readouterr().out
    assert "12 examples, each seen 0.67 times; held out: 5 in held_out" in printed
    assert "accuracy 0.0% -> 0.0%" in printed


def test_what_is_slow_is_said_where_nothing_is_generated(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SpecBackend, "fallbacks", lambda _, flow: [f"{flow.preset} is slow here"])
    sft(make_config(precision="fp8", training={"steps": 1}, data={"eval": {}}))
    assert capsys.readouterr().err.count("isobit: fp8 is slow here") == 1


def test_a_gpu_has_no_cache_where_nothing_is_generated(
    make_config: MakeConfig, own_memory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that would not fit is no reason to refuse a run that makes none."""
    monkeypatch.setattr(plan_module, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(support("cuda"), "device_model", lambda _: "NVIDIA H200")
    monkeypatch.setattr(plan, "available_memory", lambda _: 8 << 30)
    monkeypatch.setattr(run_module, "allocate_in_pages", lambda _: None)
    monkeypatch.setattr(
        model_source, "read_masters", lambda folder, config, *_: read_masters(folder, config, "cpu")
    )
    monkeypatch.setattr(
        model_source,
        "Policy",
        lambda config, precision, masters, *_: Policy(config, precision, masters),
    )
    config = make_config(rollout={"kv_memory_gib": 12.0})
    shown = "\n".join(plan_sft(config).describe(None))
    assert (
        "micro-batches of up to" in shown
        and "KV pages" not in shown
        and "tokens in rollout" not in shown
    )
    own_memory()
    run = prepare_sft(resolve(config))
    assert run.evaluator is None and isinstance(run.turns, DeviceSharing)
    assert run.turns.plan.peaks.keys() == {"training"}
    graded = make_config(rollout={"kv_memory_gib": 12.0}, reward=REWARD)
    for refused in (plan_sft, lambda config: prepare_sft(resolve(config))):
        with pytest.raises(ConfigError, match="the KV cache would take 12 GiB"):
            refused(graded)
    shown = "\n".join(plan_sft(make_config(reward=REWARD)).describe(None))
    assert "KV pages" in shown and "pages of 128 tokens in rollout" in shown


def test_only_completions_are_learnt_and_compared(make_config: MakeConfig) -> None:
    run = prepare_sft(resolve(make_config()))
    batches = run.objective.pack(run.trainer, run.next_examples(), 4096)
    examples = run.sampler.state()["cursor"]
    learnt = sum(batch.targets.numel() for batch in batches)
    assert examples == 4
    assert learnt < sum(batch.token_ids.numel() for batch in batches) / 2
    summary = sft(make_config(training={"steps": 3}))
    assert summary.tokens_trained == sum(len(example.learnt) for example in run.data.train.values())


def test_a_run_repeats_its_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    first, second = (sft(make_config(output=tmp_path / name)) for name in ("a", "b"))
    assert (first.model / "model.safetensors").read_bytes() == (
        second.model / "model.safetensors"
    ).read_bytes()
    assert first.loss_after == second.loss_after


def test_a_model_is_made_from_scratch_with_the_tokenizer_of_a_folder(
    make_config: MakeConfig,
) -> None:
    config = make_config(model="starter", from_scratch=SCRATCH)
    summary = sft(config)
    made = load_model(summary.model, config.precision).policy.config
    assert (made.vocab_size, made.num_layers, made.head_dim, made.num_kv_heads) == (128, 1, 32, 4)
    drawn = [
        prepare_sft(
            resolve(make_config(model="starter", from_scratch=SCRATCH, output="nowhere", seed=seed))
        ).model.policy.masters
        for seed in (0, 0, 1)
    ]
    same = {
        name: [torch.equal(drawn[0][name], masters[name]) for masters in drawn]
        for name in ("norm.weight", "embed_tokens.weight")
    }
    assert same == {"norm.weight": [True] * 3, "embed_tokens.weight": [True, True, False]}


def test_examples_that_are_evaluated_are_not_trained_on(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    both = write_rows(tmp_path / "both.jsonl", held_out=True, count=8)
    run = prepare_sft(resolve(make_config(data={"train": {"type": "jsonl", "path": both}})))
    assert (run.data.dropped, run.sampler.state()["prompts"]) == (5, 3)


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        (
            {"reward": REWARD, "data": {"eval": {}}},
            ConfigError,
            "reward is set, but data.eval names no set",
        ),
        ({"from_scratch": {**SCRATCH, "hidden_size": 130}}, ConfigError, "4 heads do not"),
        (
            {"from_scratch": {**SCRATCH, "vocab_size": 64}},
            ConfigError,
            "vocab_size is 64, but the tokenizer has 99 tokens",
        ),
        (
            {"data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}},
            DataError,
            "no column 'completion'",
        ),
        ({"model": "nowhere"}, ModelError, "nowhere is not a folder"),
        ({"reward": REWARD, "rollout": {"max_new_tokens": 250}}, DataError, "max_new_tokens = 250"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    make_config: MakeConfig, sections: dict[str, Any], error: type[IsobitError], message: str
) -> None:
    config = make_config(**sections)
    with pytest.raises(error, match=message):
        sft(config)
    assert not config.output.exists()


def test_a_reward_that_the_held_out_rows_do_not_suit_is_refused_by_a_dry_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n', encoding="utf-8")
    data = {"eval": {"held": {"type": "jsonl", "path": rows, "completion": "completion"}}}
    grader = tmp_path / "mine.py"
    grader.write_text("def f(completions, answer): return [0.0]\n", encoding="utf-8")
    for reward in ("exact_match", "math_verify", f"{grader}:f"):
        with pytest.raises(RewardError, match=r"'answer', which .*columns are '?completion"):
            plan_sft(make_config(data=data, reward={"function": reward}))
    with pytest.raises(RewardError, match=r"1 of the 1 prompts of data\.eval\.held come from none"):
        plan_sft(make_config(data=data, reward={"function": "reasoning_gym"}))


def test_a_used_directory_is_refused_with_the_ways_out(make_config: MakeConfig) -> None:
    sft(make_config())
    with pytest.raises(
        ConfigError,
        match=(
            r"already holds files of a run; name another directory .* go on with that run "
            r"\(--resume\)"
        ),
    ):
        sft(make_config())


def test_a_run_that_ends_early_keeps_the_weights_of_its_last_step(
    make_config: MakeConfig,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("isobit.training.trainer.gradient_norm", lambda *_: float("nan"))
    config = make_config(training={"steps": 5, "max_skipped_updates": 2})
    with pytest.raises(NonFiniteError, match="2 updates in a row were skipped"):
        sft(config)
    saved, start = (
        load_file(folder / "model.safetensors") for folder in (config.output / "model", tiny_folder)
    )
    assert all(torch.equal(saved[name], tensor) for name, tensor in start.items())
    assert "stopped early: the weights of the last update are in" in capsys.readouterr().out


def test_a_signal_stops_after_the_step_and_keeps_its_weights(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Trainer.update

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", interrupted)
    config = make_config(training={"steps": 5})
    with pytest.raises(Interrupted):
        sft(config)
    assert [line["step"] for line in lines(config.output / "metrics.jsonl")] == [0, 1]
    assert (config.output / "model" / "model.safetensors").exists()
    assert not (config.output / "summary.json").exists()


@pytest.mark.parametrize("start", [{}, {"from_scratch": SCRATCH}])
def test_the_device_is_that_of_the_configuration(
    make_config: MakeConfig, start: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.kernels.hopper.support.problem", lambda: "there is none here")
    with pytest.raises(ConfigError, match="device = 'cuda', but there is none here"):
        prepare_sft(resolve(make_config(device="cuda", **start)))
    assert (
        prepare_sft(resolve(make_config(device="auto", **start))).model.policy.device.type == "cpu"
    )


@pytest.mark.exhaustive
def test_a_held_out_loss_without_memory_is_measured_in_smaller_micro_batches(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same number, and nothing else of the run is told; it ends by name where there is no
    way.
    """
    score, most = Scorer.score, 10_000

    def small_memory(self: Scorer, batch: PackedBatch) -> Any:
        if len(batch.lengths) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return score(self, batch)

    monkeypatch.setattr(Scorer, "score", small_memory)
    plenty, little, none = (make_config(output=make_config().output / name) for name in "pln")
    expected = sft(plenty)
    most = 1
    assert replace(sft(little), directory=plenty.output, train_seconds=0, evaluation_seconds=0) == (
        replace(expected, train_seconds=0, evaluation_seconds=0)
    )
    assert not (little.output / "budget.jsonl").exists()
    most = 0
    with pytest.raises(
        OutOfMemoryError,
        match=r"the held-out loss ran out of memory: .* each micro-batch is one sequence, of",
    ):
        sft(none)


@pytest.mark.exhaustive
def test_an_out_of_memory_is_journalled(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = Trainer.update

    def small_memory(self: Trainer, batches: list[PackedBatch], *more: Any) -> Any:
        if self.updates == 1 and max(len(batch.lengths) for batch in batches) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return update(self, batches, *more)

    monkeypatch.setattr(Trainer, "update", small_memory)
    most, config = 2, make_config()
    sft(config)
    (change,) = lines(config.output / "budget.jsonl")
    assert (change["step"], change["update"], change["old"]) == (2, 1, 4096)
    assert (
        f"the update is done again with {change['new']:,}, as is every later one"
        in capsys.readouterr().out
    )
    most, config = 0, make_config(output=config.output.with_name("none"))
    with pytest.raises(
        OutOfMemoryError,
        match=r"training ran out of memory: 2.00 GiB more.* one sequence, .*leave out the longest",
    ):
        sft(config)
    assert [line["new"] for line in lines(config.output / "budget.jsonl")][-1] == 4096, (
        "nothing was learnt with less"
    )
    assert "tries 4,096 tokens" not in capsys.readouterr().out, "this run is over"


@pytest.mark.parametrize(
    ("steps", "times"), [(1, "0.25"), (397, "99"), (400, "100"), (9999, "2,500")]
)
def test_how_often_an_example_is_seen_has_no_exponent(steps: int, times: str) -> None:
    examples: Any = dict.fromkeys("abcd")
    data = SftData(examples, 0, {}, {}, (), "supervised")
    said = data.describe(OptimisationConfig(steps=steps, prompts_per_step=1))
    assert f"each seen {times} times" in said
