"""LoRA of Phi-3, whose q, k and v are one matrix with one A and one B, and gate and up another.

tests/models/test_adapters.py has all families: rollout equals training, and gradients.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isobit.commands.export import export, find_source
from isobit.config.lora import FUSED_TARGETS, LORA_TARGETS, LoraConfig
from isobit.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from isobit.models.config import Lora
from isobit.models.folder import load_policy, write_model
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from isobit.util.errors import ModelError
from tests.models.test_adapters import ALL, SOME, check_with_peft, config_of, trained

PREFIX = "base_model.model.model.layers.1."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder in which a channel of a norm stands out, so that INT8 folds it."""
    policy = random_policy(config_of("phi3", None, tied=False), "fp32", seed=0)
    with torch.no_grad():
        policy.masters["layers.0.input_norm.weight"][3] = 40.0
    save_policy(policy, tmp_path / "base", tokenizer_from=starter_folder())
    return tmp_path / "base"


@pytest.mark.parametrize("lora", [ALL, SOME])
def test_peft_computes_our_logits_and_writes_our_bytes(
    base: Path, lora: Lora, tmp_path: Path
) -> None:
    check_with_peft(trained(base, "fp32", lora), base, tmp_path)
    stored = load_file(tmp_path / "adapters" / WEIGHTS_FILE)
    shapes = {name: tuple(one.shape) for name, one in stored.items()}
    assert shapes[f"{PREFIX}self_attn.qkv_proj.lora_A.weight"] == (lora.rank, 128)
    assert shapes[f"{PREFIX}self_attn.qkv_proj.lora_B.weight"] == (256, lora.rank)
    if lora is ALL:
        assert shapes[f"{PREFIX}mlp.gate_up_proj.lora_B.weight"] == (384, lora.rank)


def test_all_linears_of_pefts_are_ours(base: Path) -> None:
    peft = pytest.importorskip("peft", reason="`pip install peft` finds all linears")
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(base)
    named = peft.get_peft_model(made, peft.LoraConfig(target_modules="all-linear"))
    found = {name.rpartition(".")[2] for name in named.targeted_module_names}
    assert found == set(FUSED_TARGETS)
    assert Lora.of(LoraConfig(), config_of("phi3", None)).targets == FUSED_TARGETS


@pytest.mark.parametrize("preset", ["fp32", "fp8", "int8"])
def test_a_folder_of_adapters_is_the_policy_again(preset: str, base: Path, tmp_path: Path) -> None:
    model = trained(base, preset)
    write_model(model, tmp_path / "adapters")
    named = json.loads((tmp_path / "adapters" / CONFIG_FILE).read_text())["target_modules"]
    assert named == [*FUSED_TARGETS]
    again = load_policy(tmp_path / "adapters", preset)
    assert again.config == model.policy.config
    assert again.checksum() == model.policy.checksum()
    write_model(replace(model, policy=again, folder=tmp_path / "adapters"), tmp_path / "second")
    first, second = (tmp_path / place / WEIGHTS_FILE for place in ("adapters", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_merged_matrices_are_the_sum_rounded_once(base: Path, tmp_path: Path) -> None:
    model = trained(base, "fp32")
    write_model(model, tmp_path / "adapters")
    source = find_source(tmp_path / "adapters", None, lambda line: None)
    export(source, tmp_path / "merged", merge=True)
    merged, plain = (load_policy(tmp_path / place, "fp32") for place in ("merged", "base"))
    for path in ("layers.0.qkv_proj", "layers.1.gate_up_proj"):
        a, b = (model.policy.masters[f"{path}.lora_{one}.weight"].detach().double() for one in "AB")
        exact = plain.masters[f"{path}.weight"].detach().double() + ALL.scale * (b @ a)
        found = merged.masters[f"{path}.weight"]
        assert torch.equal(found, exact.float().bfloat16().float())


@pytest.mark.parametrize("target", [name for name in LORA_TARGETS if name not in FUSED_TARGETS])
def test_parts_of_a_fused_matrix_are_no_targets(target: str) -> None:
    config = config_of("phi3", None)
    with pytest.raises(ModelError, match=f"has no {target}; expected some of qkv_proj, o_proj"):
        Lora.of(LoraConfig(targets=(target,)), config)
    with pytest.raises(ModelError, match=r"a qwen3 model has no qkv_proj"):
        Lora.of(LoraConfig(targets=("qkv_proj",)), config_of("qwen3", None))
