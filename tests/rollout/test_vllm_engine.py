"""vLLM as an engine, by a stand-in for its interfaces; docs/engines.md has runs of the real one."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.models.config import Experts
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.vllm_engine import VllmEngine
from isobit.run.loop import train
from isobit.util.errors import ConfigError, MismatchError, NonFiniteError, RequestError
from tests.rollout import fake_vllm
from tests.rollout.test_exactness import requests, trainer_log_probs
from tests.rollout.test_sequence import BYTES
from tests.tiny import json_lines, tiny_model

WHOLE = {"num_kv_heads": 4, "num_layers": 2}
"""Sizes of whole blocks, of which all matrices go to vLLM in E4M3."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


@cache
def policy_of(preset: Preset, **sizes: Any) -> Policy:
    """Sharper than a fresh model, so that weights matter."""
    policy = random_policy(tiny_model(**sizes), PrecisionConfig(preset=preset), seed=1)
    sharpen(policy)
    return policy


@torch.no_grad()
def sharpen(policy: Policy) -> None:
    """Other weights, published."""
    for name, master in policy.masters.items():
        if name.endswith("proj.weight"):
            master.mul_(3)
    policy.publish()


def engine_of(policy: Policy, **options: Any) -> VllmEngine:
    return VllmEngine(policy, RunRolloutConfig(engine="vllm", **options), BYTES, 3, pages=8)


def apart(policy: Policy, wanted: list[Request], groups: list[list[Completion]]) -> float:
    """The mean difference to the training forward, in nats."""
    ours = trainer_log_probs(policy, wanted, groups)
    theirs = [value for group in groups for one in group for value in one.log_probs]
    return float((ours - torch.tensor(theirs)).abs().mean())


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["bf16", "fp8-rollout", "fp8-linear"])
def test_it_samples_from_the_published_weights(preset: Preset) -> None:
    """What is recorded is near the trainer's own, and far from it with other weights there."""
    policy, wanted = policy_of(preset, **WHOLE), requests()
    engine = engine_of(policy)
    groups = generate(engine, wanted)
    assert [[one.length for one in group] for group in groups] == [
        [20] * 3,
        [12] * 2,
        [4] * 2,
        [25] * 2,
        [9] * 2,
    ]
    (llm,) = fake_vllm.Llm.made
    quantised = [name for name in llm.model.loaded if name.endswith("_inv")]
    assert len(quantised) == (0 if preset == "bf16" else 14)
    assert llm.given["kv_cache_dtype"] == ("fp8" if preset == "fp8-rollout" else "auto")
    near = apart(policy, wanted, groups)
    assert near < 0.06
    assert apart(policy_of("fp32", num_kv_heads=4, num_layers=1), wanted, groups) > 5 * near


def test_matrices_that_are_no_whole_blocks_go_in_bf16() -> None:
    engine = engine_of(policy_of("fp8-linear"))  # K and V have 64 rows each
    generate(engine, requests())
    loaded = fake_vllm.Llm.made[0].model.loaded
    assert loaded["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert loaded["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_new_weights_are_sent_and_live_samples_go_on() -> None:
    policy = random_policy(tiny_model(), PrecisionConfig(preset="bf16"), seed=1)
    engine = engine_of(policy)
    ((handle,),) = engine.submit([replace(requests()[0], samples=1)])
    for _ in range(5):
        engine.step()
    before = policy.version
    sharpen(policy)
    events = [event for _ in range(15) for event in engine.step()]
    completion = events[-1].completion
    assert completion is not None
    assert completion.weights_versions == (before,) * 5 + (policy.version,) * 15
    assert engine.stats.weight_changes == 1
    assert engine.stats.recomputed_tokens == 5
    notes = engine.notes()
    assert len(notes) == 2 and all("equal to what is published" in note for note in notes)
    assert engine.notes() == [] and handle.sample == 0


def test_weights_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one tensor of an update stays what it was."""
    policy = random_policy(tiny_model(), PrecisionConfig(preset="bf16"), seed=1)
    engine = engine_of(policy)
    generate(engine, requests())
    fake_vllm.lose_one(monkeypatch, fake_vllm.Llm.made[0].model)
    sharpen(policy)
    with pytest.raises(MismatchError, match=r"vLLM's model\.layers\.0\.mlp\.down_proj\.weight"):
        generate(engine, requests())
    assert engine.num_live == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("halved", "is_right"), [(2.0, True), (1.0, False)])
def test_blocks_that_vllm_quantises_again_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, halved: float, is_right: bool
) -> None:
    """A block whose largest byte is 224 may have twice the bytes and half the scale."""
    precision, finish = PrecisionConfig(preset="fp8-linear"), fake_vllm.Model.finish
    policy, name = random_policy(tiny_model(**WHOLE), precision, seed=1), "layers.1.o_proj"
    with torch.no_grad():
        master = policy.masters[f"{name}.weight"]
        master.mul_(225 / 1024 / master.abs().max())
    policy.publish()
    path = f"model.{name.replace('o_proj', 'self_attn.o_proj')}.weight"

    def again(self: Any) -> None:
        finish(self)
        values = self.tensors[path].float()
        assert values.shape == (128, 128)
        assert values.abs().max() == 224
        self.tensors[path] = (2 * values).to(self.tensors[path].dtype)
        self.tensors[f"{path}_scale_inv"] = self.tensors[f"{path}_scale_inv"] / halved

    monkeypatch.setattr(fake_vllm.Model, "finish", again)
    with nullcontext() if is_right else pytest.raises(MismatchError, match="o_proj"):
        generate(engine_of(policy), requests())


@pytest.mark.exhaustive
@pytest.mark.parametrize("calibration", ["engine", "never"])
def test_scales_of_the_cache_are_made_again_or_kept(calibration: str) -> None:
    """After other weights, and through its sleep."""
    precision = {"preset": "fp8-rollout", "kv_scales": "per_tensor", "kv_calibration": calibration}
    policy = random_policy(tiny_model(**WHOLE), PrecisionConfig.model_validate(precision), seed=1)
    engine = engine_of(policy)
    found: list[list[float]] = []
    for sleeps in (False, False, True):
        if sleeps:
            engine.release()
        sharpen(policy)
        generate(engine, requests())
        layers = fake_vllm.Llm.made[0].model.attentions
        found.append([float(layer._k_scale) for layer in layers])
    lines = [line for line in engine.notes() if "new scales in 2 layers: Q " in line]
    assert len(lines) == (3 if calibration == "engine" else 1)
    assert (found[0] == found[1] == found[2]) == (calibration == "never")
    assert found[0] != [1.0, 1.0]


def test_scales_that_are_not_finite_end_the_rollout() -> None:
    precision = {"preset": "fp8-rollout", "kv_scales": "per_tensor", "kv_calibration": "engine"}
    policy = random_policy(tiny_model(**WHOLE), PrecisionConfig.model_validate(precision), seed=1)
    engine = engine_of(policy)
    fake_vllm.Llm.made[0].model.attentions[1].range.fill_(0.0)
    with pytest.raises(NonFiniteError, match=r"inf.* in layer 1, which must be positive"):
        generate(engine, requests())
    assert engine.num_live == 0


def test_it_sleeps_and_wakes_with_its_samples() -> None:
    policy = policy_of("bf16")
    engine = engine_of(policy)
    wanted = [replace(requests()[0], samples=2)]
    handles = engine.submit(wanted)[0]
    for _ in range(4):
        engine.step()
    engine.release()
    assert fake_vllm.Llm.made[0].asleep
    assert engine.num_running == 0 and engine.num_live == 2
    engine.submit([requests()[3]])
    found: dict[Handle, Completion] = {}
    while engine.num_live:
        found |= {one.handle: one.completion for one in engine.step() if one.completion}
    assert len(found) == 4
    assert fake_vllm.Llm.made[0].updates == 2  # they were lost while it slept
    assert apart(policy, wanted, [[found[one] for one in handles]]) < 0.06


@pytest.mark.exhaustive
def test_half_done_samples_come_from_the_native_engine_and_go_back() -> None:
    policy, wanted = policy_of("bf16", vocab_size=96, num_layers=2), requests(temperature=0.0)
    native = NativeEngine(policy, RolloutConfig(), BYTES, 0)
    expected = generate(native, wanted)
    handles = [one for group in native.submit(wanted) for one in group]
    for _ in range(3):
        native.step()
    engine = engine_of(policy)
    engine.admit(wanted, native.withdraw(handles[:6]))
    found: dict[Handle, Completion] = {}
    for _ in range(6):
        found |= {one.handle: one.completion for one in engine.step() if one.completion}
    native.admit(wanted, engine.withdraw(handles[:6]))
    while native.num_live:
        found |= {one.handle: one.completion for one in native.step() if one.completion}
    assert len(found) == len(handles)
    by_prompt = zip(handles, (one.length for group in expected for one in group), strict=True)
    assert all(found[handle].length == length for handle, length in by_prompt)


@pytest.mark.exhaustive
def test_stop_strings_and_aborts_end_samples_here() -> None:
    engine = engine_of(policy_of("bf16"))
    wanted = [
        replace(
            one,
            sampling=replace(
                one.sampling, stop_strings=("a", "b", "c", "d", "e", "0", "1"), max_new_tokens=100
            ),
        )
        for one in requests()
    ]
    handles = [one for group in engine.submit(wanted) for one in group]
    (gone,) = engine.abort(handles[:1])
    assert gone.completion is not None and gone.completion.finish_reason == "aborted"
    ended = [one.completion for _ in range(100) for one in engine.step() if one.completion]
    assert len(ended) == len(handles) - 1
    assert any(one.finish_reason == "stop" for one in ended)
    assert all(set(one.text).isdisjoint("abcde01") for one in ended)
    assert not fake_vllm.Llm.made[0].llm_engine.waiting


def test_what_it_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(policy_of("bf16"))
    with pytest.raises(RequestError, match=r"top_k, top_p or min_p.*rollout\.engine = 'native'"):
        engine.submit([replace(requests()[0], sampling=SamplingParams(4, 1.0, top_p=0.9))])
    for preset, has in (("int8", "INT8"), ("int8-linear", "INT8"), ("fp32", "FP32")):
        with pytest.raises(ConfigError, match=f"fp8-linear and fp8-rollout, and .* has {has};"):
            engine_of(policy_of(preset))
    with pytest.raises(ConfigError, match="with experts"):
        engine_of(policy_of("bf16", family="mixtral", experts=Experts(4, 2, 64, True)))
    assert engine.num_live == 0
    lowered = policy_of("bf16")
    portable = Mock(wraps=lowered.backend)
    portable.name = "triton"
    monkeypatch.setattr(lowered, "backend", portable)
    with pytest.raises(ConfigError, match="all kernels of its process compiled for sm_80"):
        engine_of(lowered)


def test_a_missing_or_other_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, version="0.31.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.0 is installed, and 0\.25\.1 was tested"):
        engine_of(policy_of("bf16"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'isobit\[vllm\]'"):
        engine_of(policy_of("bf16"))


def test_a_run_says_what_samples_and_corrects_for_it(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps: the weights of the first update arrive, and each token that is learnt from is
    weighed.
    """
    config = make_config(rollout={"engine": "vllm"}, precision="bf16")
    assert [one.type for one in config.corrections] == ["tis"]
    train(config)
    said = capsys.readouterr().out
    assert "vllm 0.25.1 samples, with weights and kernels of its own" in said
    assert "corrections: tis" in said
    assert said.count("equal to what is published") == 2  # before each step
    steps = json_lines(config.output / "metrics.jsonl")
    rows = [row for row in steps if "mismatch/k3" in row]
    assert len(rows) == 2
    assert all(0 < row["log_prob_diff/mean"] < 0.05 for row in rows)
    assert rows[0]["time/update_s"] == 0  # the first evaluation had these weights sent
    assert rows[1]["time/update_s"] > 0
    manifest = json.loads((config.output / "run.json").read_text())
    assert manifest["precision"]["exact"] is False
    assert manifest["engine"]["engine"] == "vllm 0.25.1"


def test_a_rollout_table_of_python_code_is_taken(make_config: Callable[..., RunConfig]) -> None:
    values = make_config().model_dump() | {"rollout": RolloutConfig(max_sequences=3)}
    rollout = RunConfig.model_validate(values).rollout
    assert (rollout.engine, rollout.max_sequences) == ("native", 3)
    assert rollout.model_fields_set == {"max_sequences"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"engine": "vllm"}, "cluster": {"processes": 2}}, "a run of one process"),
        (
            {
                "rollout": {"engine": "vllm"},
                "corrections": (),
                "training": {"old_log_probs": "recorded"},
            },
            "another function",
        ),
        ({"rollout": {"engine_options": {"enforce_eager": True}}}, "arguments of vllm.LLM"),
    ],
)
def test_recipes_that_contradict_it_are_refused(
    make_config: Callable[..., RunConfig], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_config(**sections))
