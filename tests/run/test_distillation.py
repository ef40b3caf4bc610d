"""Runs with a teacher: what they learn, that they repeat and are resumed to the same bytes, and
what is refused before anything is written.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.dry_run import plan_training
from isobit.config.load import build
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rules import check_run, check_sft
from isobit.models.adapter_folder import WEIGHTS_FILE
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.models.scorer import Scorer
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import read_rl
from isobit.run.sft import prepare_sft, read_sft, sft
from isobit.training.supervised import DistilFigures
from isobit.util.errors import CheckpointError, ConfigError
from tests.tiny import TINY, json_lines, save_tiny, with_sections

MakeSft = Callable[..., SftConfig]
MakeRun = Callable[..., RunConfig]
SCRATCH = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 1, "num_heads": 4}
RESUMED = (
    "checkpoints/step_000003/masters.safetensors",
    "checkpoints/step_000003/optimiser.safetensors",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("distillation") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A larger model with the same tokenizer, and sharper distributions."""
    folder = tmp_path_factory.mktemp("distillation") / "other"
    shape = replace(TINY, hidden_size=256, num_layers=2)
    policy = random_policy(shape, PrecisionConfig(preset="fp32"), seed=7)
    with torch.no_grad():
        policy.masters["embed_tokens.weight"].mul_(3)
    save_policy(policy, folder, tokenizer_from=model)
    return folder


@pytest.fixture
def make_sft(model: Path, tmp_path: Path) -> MakeSft:
    """Three steps of an FP8 policy towards its own start in BF16."""
    values = {
        "objective": "distil",
        "model": str(model),
        "output": tmp_path / "run",
        "threads": 1,
        "precision": "fp8",
        "data": {
            "train": {"type": "jsonl", "path": "recipes/fine_tune.jsonl"},
            "eval": {
                "held_out": {
                    "type": "jsonl",
                    "path": "recipes/fine_tune_held_out.jsonl",
                    "limit": 6,
                }
            },
        },
        "training": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 3},
    }

    def make(**sections: Any) -> SftConfig:
        return build(SftConfig, with_sections(values, sections), "test")

    return make


@pytest.fixture
def make_run(model: Path, tmp_path: Path) -> MakeRun:
    """Three steps of on-policy distillation alone."""
    values = {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "threads": 1,
        "precision": "fp8",
        "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 10}},
        "reward": {"function": "none", "in_process": True},
        "rollout": {"max_new_tokens": 6},
        "teacher": {"only": True},
        "training": {
            "steps": 3,
            "prompts_per_step": 8,
            "samples_per_prompt": 1,
            "learning_rate": 1e-3,
        },
        "checkpoint": {"every": 1, "keep_last": 3},
    }

    def make(**sections: Any) -> RunConfig:
        return build(RunConfig, with_sections(values, sections), "test")

    return make


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp8", "int8", "bf16", "fp8-rollout"])
@pytest.mark.parametrize(
    "teacher", [{}, {"kl": "reverse"}, {"top_k": 3}, {"kl": "reverse", "top_k": 3}]
)
def test_a_policy_learns_another_models_distribution(
    teacher: dict[str, Any], precision: str, make_sft: MakeSft, other: Path
) -> None:
    config = make_sft(
        precision=precision,
        teacher={"model": str(other), **teacher},
        training={"steps": 8, "learning_rate": 3e-3},
    )
    summary = sft(config)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert 0 < summary.loss_after < 0.7 * summary.loss_before
    first, last = (
        {**line}
        for line in json_lines(config.output / "metrics.jsonl")
        if "eval/held_out/teacher_nll" in line
    )
    assert first["eval/held_out/teacher_nll"] == last["eval/held_out/teacher_nll"]
    assert first["eval/held_out/loss"] == summary.loss_before


def test_in_8_bits_a_policy_begins_near_its_own_start_and_comes_nearer(make_sft: MakeSft) -> None:
    config = make_sft(training={"steps": 8, "prompts_per_step": 16, "learning_rate": 2e-5})
    summary = sft(config)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert 0 < summary.loss_after < summary.loss_before < 0.001


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", ["forward", "reverse"])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_from_its_own_function_a_policy_learns_exactly_nothing(
    preset: str, kl: str, make_sft: MakeSft, model: Path
) -> None:
    config = make_sft(precision=preset, teacher={"precision": preset, "kl": kl})
    summary = sft(config)
    assert summary.loss_before == summary.loss_after == 0.0
    steps = [line for line in json_lines(config.output / "metrics.jsonl") if "grad_norm" in line]
    assert [line["loss"] for line in steps] == [0.0] * 3
    assert [line["grad_norm"] for line in steps] == [0.0] * 3
    assert [line["weight_bytes_changed"] for line in steps] == [0.0] * 3
    found = (config.output / "model" / "model.safetensors").read_bytes()
    assert found == (model / "model.safetensors").read_bytes()


def test_a_run_repeats_and_is_resumed_to_the_same_bytes(make_sft: MakeSft, tmp_path: Path) -> None:
    whole, again, cut = (
        make_sft(output=tmp_path / name, teacher={"kl": "reverse", "top_k": 20})
        for name in ("whole", "again", "cut")
    )
    sft(whole)
    sft(again)
    ended = _ended_by("isobit.run.sft.SftRun.next_examples", 3)
    with ended, pytest.raises(KeyboardInterrupt):
        sft(cut)
    sft(cut, resume=True)
    for name in ("model/model.safetensors", *RESUMED):
        wanted = (whole.output / name).read_bytes()
        assert (again.output / name).read_bytes() == wanted, name
        assert (cut.output / name).read_bytes() == wanted, name


def test_a_run_is_not_resumed_with_another_teacher(
    make_sft: MakeSft, other: Path, tmp_path: Path
) -> None:
    teacher = shutil.copytree(other, tmp_path / "teacher")
    config = make_sft(teacher={"model": str(teacher)}, training={"steps": 1})
    sft(config)
    stored = teacher / "model.safetensors"
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(bytes(content))
    more = make_sft(teacher={"model": str(teacher)}, training={"steps": 2})
    with pytest.raises(CheckpointError, match="are not those that this run was held to"):
        sft(more, resume=True)


def test_held_out_figures_do_not_depend_on_micro_batches(make_sft: MakeSft, other: Path) -> None:
    """Equal in bits, and equal to what each example gives alone."""
    config = make_sft(teacher={"model": str(other)})
    run = prepare_sft(resolve(config))
    examples = run.data.sets["held_out"]
    assert run.trainer.teacher is not None
    found = [
        run.objective.measure(run.trainer, run.objective.pack(run.trainer, examples, tokens))
        for tokens in (1, 100, 4096)
    ]
    assert found[0] == found[1] == found[2]
    log_probs = [
        Scorer(run.trainer.teacher.model).score(batch).log_probs
        for batch in run.objective.pack(run.trainer, examples, 1)
    ]
    figures = found[0][1]
    assert isinstance(figures, DistilFigures)
    assert figures.teacher_nll == pytest.approx(-float(torch.cat(log_probs).double().mean()))


def test_adapters_are_pulled_to_a_teacher(make_sft: MakeSft, other: Path) -> None:
    config = make_sft(
        lora={"rank": 8},
        teacher={"model": str(other)},
        training={"steps": 6, "learning_rate": 1e-2},
    )
    summary = sft(config)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert 0 < summary.loss_after < summary.loss_before
    assert (config.output / "model" / WEIGHTS_FILE).is_file()


def test_a_model_from_scratch_is_taught_by_the_model_that_gives_its_tokenizer(
    make_sft: MakeSft, other: Path
) -> None:
    config = make_sft(
        model=str(other),
        from_scratch=SCRATCH,
        training={"steps": 10, "learning_rate": 3e-3},
    )
    summary = sft(config)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert summary.loss_after < 0.7 * summary.loss_before


def test_the_memory_plan_and_the_first_lines_name_the_teacher(
    make_sft: MakeSft, make_run: MakeRun, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = {"model": str(other)}
    for config, read in (
        (make_sft(teacher=teacher), read_sft),
        (make_run(teacher=teacher), read_rl),
    ):
        shown = "\n".join(plan_training(config, read).describe(None))
        assert "teacher" in shown
    sft(make_sft(teacher={**teacher, "top_k": 3}, training={"steps": 1}))
    shown = capsys.readouterr().out
    assert f"teacher: {other}, bf16; forward KL over its 3 likeliest tokens and the rest" in shown


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"objective": "supervised", "teacher": {}}, "set objective to 'distil'"),
        ({"objective": "preference", "teacher": {}}, "objective is 'preference', which has none"),
    ],
)
def test_a_teacher_without_its_objective_is_refused(
    sections: dict[str, Any], reason: str, make_sft: MakeSft
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_sft(make_sft(**sections))


def test_another_tokenizer_is_refused(
    make_sft: MakeSft, make_run: MakeRun, other: Path, tmp_path: Path
) -> None:
    """By its tokens, before any weight is read."""
    folder = shutil.copytree(other, tmp_path / "other words")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    (first, a), (second, b) = list(vocab.items())[5:7]
    vocab[first], vocab[second] = b, a
    path.write_text(json.dumps(content))
    (folder / "model.safetensors").unlink()
    teacher = {"model": str(folder)}
    reason = r"teacher.model is .* has other tokens than"
    with pytest.raises(ConfigError, match=reason):
        sft(make_sft(teacher=teacher))
    with pytest.raises(ConfigError, match=reason):
        train(make_run(teacher=teacher))
    assert not make_run().output.exists()


def test_a_short_context_and_adapters_are_refused(
    make_sft: MakeSft, model: Path, tmp_path: Path
) -> None:
    short = save_tiny(tmp_path / "short", replace(TINY, max_positions=8))
    with pytest.raises(ConfigError, match="whose context is 8 tokens"):
        sft(make_sft(teacher={"model": str(short)}))
    sft(make_sft(objective="supervised", lora={"rank": 8}, training={"steps": 1}))
    adapters = str(tmp_path / "run" / "model")
    with pytest.raises(ConfigError, match="the folder of adapters"):
        sft(make_sft(teacher={"model": adapters}, output=tmp_path / "more"))


# On what the policy samples.


@pytest.mark.exhaustive
@pytest.mark.parametrize("kl", ["sampled", "reverse", "forward"])
def test_a_policy_learns_from_a_teacher_alone(kl: str, make_run: MakeRun, other: Path) -> None:
    teacher = {"model": str(other), "kl": kl}
    config = make_run(
        teacher=teacher, training={"steps": 20, "prompts_per_step": 32, "learning_rate": 5e-3}
    )
    train(config)
    steps = _steps(config.output)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * 20
    assert steps[-1]["teacher/kl"] < 0.8 * steps[0]["teacher/kl"]
    assert all(line["reward/mean"] == 0 for line in steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", ["sampled", "reverse", "forward"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_the_first_step_is_at_0_from_ones_own_function(
    preset: str, kl: str, make_run: MakeRun, model: Path
) -> None:
    """And without an advantage there is nothing to learn."""
    config = make_run(precision=preset, teacher={"precision": preset, "kl": kl})
    train(config)
    for line in _steps(config.output):
        assert line["teacher/kl"] == 0.0
        assert line.get("grad_norm", 0.0) == 0.0
    found = (config.output / "model" / "model.safetensors").read_bytes()
    assert found == (model / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kl", ["sampled", "reverse"])
def test_beside_a_reward_a_run_is_exact_and_resumed_to_the_same_bytes(
    kl: str, make_run: MakeRun, tmp_path: Path
) -> None:
    sections = {
        "teacher": {"kl": kl, "only": False, "coefficient": 0.5},
        "reward": {"function": "tests.run.test_lora:reward"},
        "training": {"prompts_per_step": 4, "samples_per_prompt": 4, "learning_rate": 1e-2},
    }
    whole, cut = make_run(**sections), make_run(**sections, output=str(tmp_path / "cut"))
    train(whole)
    steps = _steps(whole.output)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0, 0, 0]
    assert all("teacher/kl" in line and line["reward/mean"] > 0 for line in steps)
    with _ended_by("isobit.run.loop.take_step", 3), pytest.raises(KeyboardInterrupt):
        train(cut)
    train(cut, resume=True)
    for name in ("model/model.safetensors", "digests.jsonl", *RESUMED):
        assert (cut.output / name).read_bytes() == (whole.output / name).read_bytes(), name


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"teacher": {"top_k": 5}}, "teacher.top_k is 5"),
        (
            {"algorithm": {"name": "grpo", "calibrate_every": 2}, "training": {"epochs": 2}},
            "algorithm.calibrate_every is 2",
        ),
        ({"algorithm": {"name": "gspo"}}, "algorithm.name is gspo"),
        ({"replay": {"fraction": 0.5}}, "replay.fraction is above 0"),
        ({"algorithm": {"name": "ppo"}}, "algorithm is ppo"),
        ({"algorithm": {"name": "dapo"}}, "algorithm.dynamic_sampling is True"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused_by_its_key(
    sections: dict[str, Any], reason: str, make_run: MakeRun
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_run(make_run(**sections))


def _steps(output: Path) -> list[dict[str, Any]]:
    return [line for line in json_lines(output / "metrics.jsonl") if "teacher/kl" in line]


class _ended_by:  # noqa: N801  a block
    """A block in which the call number ``last`` of a function ends the process' run."""

    def __init__(self, name: str, last: int) -> None:
        self._patch, self._name, self._last, self._calls = pytest.MonkeyPatch(), name, last, 0

    def __enter__(self) -> None:
        module, _, attribute = self._name.rpartition(".")
        from pkgutil import resolve_name

        real = getattr(resolve_name(module), attribute)

        def call(*arguments: Any) -> Any:
            self._calls += 1
            if self._calls == self._last:
                raise KeyboardInterrupt
            return real(*arguments)

        self._patch.setattr(self._name, call)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
