"""Runs that train adapters: exact, resumed to the same bytes, and ended where nothing arrives."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.export import export, find_source
from isobit.config.lora import LORA_TARGETS
from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rules import check_run, check_sft
from isobit.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from isobit.models.config import Lora
from isobit.models.layers import Weights
from isobit.models.policy import Policy
from isobit.models.safetensors import TensorFile
from isobit.precision.quant_tensor import Side
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.util.errors import CheckpointError, ConfigError, MismatchError, ModelError
from tests.models.policies import delta_nets, small_experts
from tests.run.test_recorded_flow import as_recorded_before
from tests.tiny import json_lines, save_tiny, tiny_model, with_sections

LORA = {"rank": 8, "targets": "all-linear"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture
def make_config(model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    values = {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "threads": 1,
        "lora": LORA,
        "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 10}},
        "reward": {"function": "tests.run.test_lora:reward", "in_process": True},
        "rollout": {"max_new_tokens": 4},
        "training": {
            "steps": 3,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "learning_rate": 1e-2,
        },
        "checkpoint": {"every": 1, "keep_last": 3},
    }

    def make(**sections: Any) -> RunConfig:
        return RunConfig.model_validate(with_sections(values, sections))

    return make


def reward(prompt: Any, completion: Any) -> float:
    return float(completion.token_ids[0] % 3 + len(completion.token_ids) % 2)


MakeConfig = Callable[..., RunConfig]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "fp8"},
        {"precision": "int8", "algorithm": {"name": "grpo", "kl_coefficient": 0.1}},
        {"precision": {"preset": "int8", "dgrad": "int8"}},
        {"precision": "bf16", "algorithm": {"name": "ppo"}},
        {"precision": {"preset": "fp8", "kv_scales": "per_tensor"}},
        {"precision": {"preset": "fp8", "kv_scales": "per_tensor", "kv_calibration": "engine"}},
    ],
)
def test_a_run_is_exact_and_leaves_adapters(
    sections: dict[str, Any], make_config: MakeConfig, model: Path
) -> None:
    config = make_config(**sections)
    train(config)
    lines = json_lines(config.output / "metrics.jsonl")
    steps = [line for line in lines if "log_prob_diff/tokens_differing" in line]
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0, 0, 0]
    folder = config.output / "model"
    assert {file.name for file in folder.iterdir()} >= {CONFIG_FILE, WEIGHTS_FILE}
    assert not (folder / "model.safetensors").exists()
    masters = TensorFile(config.output / "checkpoints" / "step_000003" / "masters.safetensors")
    assert all("lora_" in name or name == "value_head.weight" for name in masters)
    assert any(bool(masters[name].any()) for name in masters if "lora_B" in name)
    found = [
        export(find_source(config.output, step, print), config.output / f"out {step}").folder
        for step in (None, 3)
    ]
    for one in found:
        assert (one / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()


@pytest.mark.exhaustive
def test_a_model_in_int8_is_trained_on_as_it_is(
    make_config: MakeConfig, model: Path, tmp_path: Path
) -> None:
    precision = PrecisionConfig(preset="int8")
    source = find_source(model, None, lambda line: None)
    base = export(source, tmp_path / "int8", "int8", precision).folder
    config = make_config(model=str(base), precision="int8", training={"steps": 2})
    train(config)
    train(make_config(model=str(base), precision="int8"), resume=True)
    lines = json_lines(config.output / "metrics.jsonl")
    found = [one["log_prob_diff/tokens_differing"] for one in lines if "log_prob_diff/mean" in one]
    assert found == [0, 0, 0]
    stored = json.loads((config.output / "model" / CONFIG_FILE).read_text())
    assert stored["base_model_name_or_path"] == f"./{base.name}"
    with pytest.raises(ModelError, match=r"is in INT8.* exported from"):
        train(make_config(model=str(base), precision="fp8", output=str(tmp_path / "fp8")))


def test_a_resumed_run_has_the_same_bytes(make_config: MakeConfig, tmp_path: Path) -> None:
    check_resumed(make_config(), make_config(output=str(tmp_path / "cut")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_so_has_that_of_a_hybrid_whose_delta_nets_learn(
    family: Family, precision: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    shape = tiny_model(family=family, num_layers=2, **delta_nets(family, 2))
    shape = replace(shape, experts=small_experts(family, 4, 64))
    options = {"model": str(save_tiny(tmp_path / "hybrid", shape)), "precision": precision}
    whole = make_config(**options)
    check_resumed(whole, make_config(**options, output=str(tmp_path / "cut")))
    lines = json_lines(whole.output / "metrics.jsonl")
    found = [one["log_prob_diff/tokens_differing"] for one in lines if "log_prob_diff/mean" in one]
    assert found == [0, 0, 0]
    masters = TensorFile(whole.output / "checkpoints" / "step_000003" / "masters.safetensors")
    shared = [f"shared_expert{name}" for name in (".gate_up_proj", ".down_proj", "_gate")]
    for path in ("in_proj", "gates", "out_proj", *(shared if shape.experts else ())):
        assert bool(masters[f"layers.0.{path}.lora_B.weight"].any())


@pytest.mark.exhaustive
def test_all_linears_of_a_run_of_an_earlier_version_are_those_that_it_had(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def said_all(table: dict[str, Any]) -> None:
        table["targets"] = ["all-linear"]

    shape = tiny_model(family="qwen3_5_text", num_layers=2, **delta_nets("qwen3_5_text", 2))
    model = str(save_tiny(tmp_path / "hybrid", shape))
    steps = [{"steps": count, "schedule": "constant"} for count in (1, 2)]
    targets = {"rank": 4, "targets": list(LORA_TARGETS)}
    few = make_config(model=model, lora=targets, training=steps[0])
    train(few)
    as_recorded_before(few.output, said_all, "lora")
    every = {"rank": 4, "targets": "all-linear"}
    train(make_config(model=model, lora=every, training=steps[1]), resume=True)
    assert find_source(few.output, 2, print).config.lora == Lora(4, 8.0, LORA_TARGETS)


def check_resumed(whole: RunConfig, cut: RunConfig) -> None:
    train(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isobit.run.loop.take_step", _ends_before(3))
        with pytest.raises(KeyboardInterrupt):
            train(cut)
    train(cut, resume=True)
    for name in (
        f"model/{WEIGHTS_FILE}",
        "checkpoints/step_000003/masters.safetensors",
        "checkpoints/step_000003/optimiser.safetensors",
        "digests.jsonl",
        "completions.jsonl",
    ):
        assert (cut.output / name).read_bytes() == (whole.output / name).read_bytes(), name


def _ends_before(last: int) -> Callable[[Any, int], Any]:
    from isobit.run.loop import take_step

    def step(run: Any, number: int) -> Any:
        if number == last:
            raise KeyboardInterrupt
        return take_step(run, number)

    return step


def test_another_base_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "model")
    config = make_config(model=str(base), training={"steps": 1})
    train(config)
    stored = base / "model.safetensors"
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(bytes(content))
    more = make_config(model=str(base), training={"steps": 2})
    with pytest.raises(CheckpointError, match="the adapters were trained on a model"):
        train(more, resume=True)


def test_an_engine_that_keeps_the_first_adapters_is_noticed_before_step_1(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[int, Weights] = {}
    weights = Policy.weights

    def stale(policy: Policy, side: Side) -> Weights:
        found = weights(policy, side)
        if side == "training" or policy.config.lora is None:
            return found
        if id(policy) not in first:
            linears = {
                path: replace(one, matrix=one.matrix.clone())
                if isinstance(one.matrix, torch.Tensor)
                else one
                for path, one in found.linears.items()
            }
            first[id(policy)] = replace(found, linears=linears)
        return first[id(policy)]

    monkeypatch.setattr("isobit.models.policy.check_delivered", lambda policy: None)
    monkeypatch.setattr(Policy, "weights", stale)
    with pytest.raises(MismatchError, match="log-probabilities are not the trainer's"):
        train(make_config())


@pytest.mark.parametrize("kv_scales", ["per_token", "per_tensor"])
def test_adapters_that_nobody_reads_are_noticed_before_step_1(
    kv_scales: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.models.layers.Adapter.add", lambda *_: None)
    with pytest.raises(MismatchError, match="are those without them"):
        train(make_config(precision={"preset": "fp8", "kv_scales": kv_scales}))


@pytest.mark.exhaustive
def test_fine_tuning_and_going_on_from_its_adapters(
    make_config: MakeConfig, model: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "model": str(model),
        "output": str(tmp_path / "sft"),
        "lora": LORA,
        "data": {"train": {"type": "jsonl", "path": "recipes/fine_tune.jsonl"}},
        "training": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-2},
    }
    sft(SftConfig.model_validate(values))
    adapters = tmp_path / "sft" / "model"
    with pytest.raises(ConfigError, match="has adapters of its own"):
        train(make_config(model=str(adapters)))
    without = make_config(model=str(adapters)).model_copy(update={"lora": None})
    train(without)
    assert (without.output / "model" / CONFIG_FILE).read_bytes() == (
        adapters / CONFIG_FILE
    ).read_bytes()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"precision": {"preset": "fp8", "wgrad": "fp8"}}, "precision.wgrad is 'fp8'"),
        ({"reference": {"refresh_every": 5}}, "the reference is the base"),
        ({"reference": {"offload": True}}, "the reference is the policy's own base"),
        ({"rollout": {"engine": "vllm"}}, "adapters are published to the native engine"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_by_its_key(
    sections: dict[str, Any], reason: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_run(make_config(**sections))


def test_a_reward_model_has_no_adapters() -> None:
    config = SftConfig.model_validate(
        {
            "objective": "preference",
            "output": "x",
            "lora": {},
            "data": {"train": {"type": "jsonl", "path": "recipes/preferences.jsonl"}},
        }
    )
    with pytest.raises(ConfigError, match="leave \\[lora\\] out"):
        check_sft(config)
