"""Hugging Face folders in and out, and every way in which one can be wrong.

A device that a machine has and a command does not take gets a line.
"""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.folder import choose_device, load_policy, read_config, read_masters
from isobit.models.policy import random_policy
from isobit.models.rope import Llama3Scaling
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.util.errors import ConfigError, ModelError
from tests.models.policies import delta_nets, logits_of

FP32 = PrecisionConfig(preset="fp32")


def make_config(
    family: Family = "qwen3", tied: bool = True, scaling: Llama3Scaling | None = None
) -> ModelConfig:
    sizes = 64, 128, 256, 2, 4, 2, 32, 128, 1e-6, 1e4, tied, scaling
    return ModelConfig(family, *sizes, **delta_nets(family, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(random_policy(make_config(), FP32, seed=0), tmp_path)
    return tmp_path


def test_layers_that_guess_are_left_out_of_a_decoder_alone(tmp_path: Path) -> None:
    """As transformers does; with a tower beside it they are kept (test_larger_model.py)."""
    save_policy(random_policy(make_config("qwen3_5_text"), FP32, seed=0), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / WEIGHTS_FILE)
    again = load_policy(tmp_path, FP32)
    save_policy(again, tmp_path / "again", tmp_path)
    assert load_file(tmp_path / "again" / WEIGHTS_FILE).keys() == tensors.keys()
    save_policy(random_policy(make_config("qwen3"), FP32, seed=0), tmp_path / "other")
    tensors = load_file(tmp_path / "other" / WEIGHTS_FILE)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "other" / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"holds mtp.fc.weight, which a qwen3 decoder does not"):
        load_policy(tmp_path / "other", FP32)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "olmo2", "olmo3"),
        *("gemma3_text", "qwen3_5_text"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_and_transformers(family: Family, tied: bool, tmp_path: Path) -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 32) if family == "llama" else None
    policy = random_policy(make_config(family, tied, scaling), FP32, seed=1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(torch.randn_like(master) * 0.05).copy_(master.bfloat16())
    policy.publish()
    save_policy(policy, tmp_path)
    again = load_policy(tmp_path, FP32)
    assert again.config == policy.config
    assert all(torch.equal(again.masters[name], master) for name, master in policy.masters.items())
    stored = load_file(tmp_path / WEIGHTS_FILE).values()
    assert {tensor.dtype for tensor in stored} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    ids = torch.randint(0, 64, (90,))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(policy, ids), expected, atol=1e-4, rtol=1e-4)


def test_a_value_head_is_in_no_folder_and_starts_at_zeros(folder: Path, tmp_path: Path) -> None:
    """What is written is what the model without one writes, which transformers loads."""
    policy = load_policy(folder, FP32, value_head=True)
    assert not policy.masters["value_head.weight"].any()
    with torch.no_grad():
        policy.masters["value_head.weight"].fill_(3.0)
    policy.publish()
    again = tmp_path / "again"
    save_policy(policy, again)
    for name in (WEIGHTS_FILE, "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert not load_policy(again, FP32, value_head=True).masters["value_head.weight"].any()


def test_the_masters_of_a_score_head_are_read_as_they_were_written(tmp_path: Path) -> None:
    config = replace(make_config(), score_head=True)
    policy = random_policy(config, PrecisionConfig(preset="fp8"), seed=0)
    save_policy(policy, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert tensors["score.weight"].shape == (1, config.hidden_size)
    assert tensors["score.weight"].any() and "lm_head.weight" not in tensors
    read: dict[str, Any] = dict(read_masters(tmp_path, config))
    assert read.keys() == policy.masters.keys()
    for name, master in policy.masters.items():
        assert torch.equal(read[name], master.detach().bfloat16().float())


def test_missing_folder_and_missing_files(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load_policy(tmp_path / "nowhere", FP32)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match="pickled weights"):
        load_policy(folder, FP32)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_policy(folder, FP32)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_config_that_is_not_an_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_policy(folder, FP32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are LlamaForCausalLM"),
        ({"architectures": None}, "not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 512}, "head size 512"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        ({"intermediate_size": 128}, r"gate_proj.weight has the shape \(256, 128\), but"),
        ({"num_hidden_layers": 3}, "tensors are missing, the first is model.layers.2"),
        ({"num_hidden_layers": 1}, "holds model.layers.1"),
        ({"tie_word_embeddings": False}, "the first is lm_head.weight"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_policy(folder, FP32)


def test_one_master_is_in_memory_at_a_time(folder: Path) -> None:
    """A checkpoint need not fit the memory once more beside what is made of it."""
    config, masters = read_config(folder), list[weakref.ref[Any]]()
    for _, master in read_masters(folder, config):
        assert not any(earlier() is not None for earlier in masters), "two masters at once"
        masters.append(weakref.ref(master))
        del master
    assert len(masters) == len(build_decoder(config).masters())


MODEL = ModelConfig("qwen3", 128, 128, 128, 2, 8, 2, 32, 256, 1e-6, 10000.0, tied_embeddings=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("fp8", "the model has 8 query heads of 32 over 2 KV heads"),
        ("fp32", "precision 'fp32' is the CPU's reference"),
    ],
)
def test_the_models_heads_and_flow_decide(
    hopper: None, preset: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = PrecisionConfig.model_validate({"preset": preset})
    assert choose_device("auto", MODEL, precision) == torch.device("cpu")
    assert f"isobit: computing on cpu, because {reason}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda", MODEL, precision)
    assert choose_device("cpu", MODEL, precision) == torch.device("cpu")
    assert capsys.readouterr().err == "", "what was asked for needs no reason"
