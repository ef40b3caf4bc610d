"""A folder of Gemma 3 or Qwen3.5 with a vision tower: its decoder is read, and the rest is kept."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # whose models take three seconds to import, where they are used
from safetensors.torch import load_file, save_file

from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import PrecisionConfig
from isobit.models.adapter_folder import write_adapters
from isobit.models.adapters import folded_columns, peft_tensors
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import Lora, ModelConfig
from isobit.models.folder import load_policy, read_config, read_masters
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import (
    Contents,
    PolicyTensors,
    fp8_contents,
    int8_contents,
    save_policy,
    write_folder,
)
from isobit.util.errors import ModelError
from tests.models.policies import logits_of

SECTIONS = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
IDS = torch.arange(90) * 17 % 60
PATTERN = ["sliding_attention", "full_attention"]
REST = ("vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it; all of its numbers are those of BF16."""
    torch.manual_seed(0)
    text: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 64, "sliding_window": 8, "layer_types": PATTERN, "initializer_range": 0.1}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.0)
            parameter.add_(noise).copy_(parameter.bfloat16())
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, local_files_only=True
    ).float()
    if adapters is not None:
        from peft import PeftModel  # whose import takes seconds

        model = PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def edited(made: Path, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    shutil.copytree(made, folder, dirs_exist_ok=True)
    if tensors is not None:
        save_file(dict(tensors), folder / WEIGHTS_FILE, {"format": "pt"})
    return folder


def newer(name: str) -> str:
    """The names of transformers' modules."""
    name = name.replace("language_model.model.", "model.language_model.")
    return f"model.{name}" if name.startswith(REST) else name


@pytest.mark.few(1)
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_run_leaves_the_tower_as_it_was(made: Path, is_newer: bool, tmp_path: Path) -> None:
    """Every byte that was not trained, under the same names, and what is trained changes alone."""
    before = {newer(n) if is_newer else n: x for n, x in load_file(made / WEIGHTS_FILE).items()}
    source = edited(made, tmp_path / "source", before)
    policy = load_policy(source, "fp32")
    torch.testing.assert_close(logits_of(policy, IDS), theirs(source), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(2)
    policy.publish()
    save_policy(policy, tmp_path / "trained", source)
    after = load_file(tmp_path / "trained" / WEIGHTS_FILE)
    assert after.keys() == before.keys()
    kept = [name for name in before if name.removeprefix("model.").startswith(REST)]
    assert len(kept) == 34
    for name, values in before.items():
        assert after[name].dtype == (values.dtype if name in kept else torch.bfloat16)
        assert torch.equal(after[name].float(), values.float() * (1 if name in kept else 2))
    again = load_policy(tmp_path / "trained", "fp32")
    assert again.config == policy.config
    written, given = (
        json.loads((one / "config.json").read_text()) for one in (source, tmp_path / "trained")
    )
    assert {**given, "text_config": 0} == {**written, "text_config": 0}
    assert given["text_config"]["eos_token_id"] == written["text_config"]["eos_token_id"] == 1
    assert torch.equal(logits_of(again, IDS), logits_of(policy, IDS))
    expected = theirs(tmp_path / "trained")
    torch.testing.assert_close(logits_of(again, IDS), expected, atol=1e-4, rtol=1e-4)


def qwen(folder: Path, has_experts: bool) -> Path:
    """Qwen3.5 with a tower, as transformers writes it."""
    torch.manual_seed(0)
    text: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    text |= {"linear_value_head_dim": 32, "initializer_range": 0.05}
    text |= {"mtp_num_hidden_layers": 1, "rope_parameters": SECTIONS}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"out_hidden_size": 128, "patch_size": 4, "num_position_embeddings": 16}
    model: Any = transformers.Qwen3_5ForConditionalGeneration
    config: Any = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    if has_experts:
        text |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        del text["intermediate_size"]
        text |= {"shared_expert_intermediate_size": 56}
        model = transformers.Qwen3_5MoeForConditionalGeneration
        config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    model(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_experts", [False, True])
def test_qwen_with_a_tower_and_layers_that_guess(has_experts: bool, tmp_path: Path) -> None:
    """Both stay as they were, around a decoder with gated delta nets."""
    source, trained = qwen(tmp_path / "source", has_experts), tmp_path / "trained"
    before = load_file(source / WEIGHTS_FILE)
    before |= {"mtp.layers.0.mlp.up_proj.weight": torch.randn(8, 8).bfloat16()}
    save_file(before, source / WEIGHTS_FILE, {"format": "pt"})
    policy = load_policy(source, "fp32")
    torch.testing.assert_close(logits_of(policy, IDS), theirs(source), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        policy.masters["layers.0.a_log"].add_(0.5)
    policy.publish()
    save_policy(policy, trained, source)
    after = load_file(trained / WEIGHTS_FILE)
    assert after.keys() == before.keys()
    changed = [name for name in before if not torch.equal(after[name], before[name])]
    assert changed == ["model.language_model.layers.0.linear_attn.A_log"]
    here, there = (
        json.loads((one / "config.json").read_text())["text_config"] for one in (source, trained)
    )
    assert here.keys() <= there.keys() and there["mtp_num_hidden_layers"] == 1
    assert there["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert load_policy(trained, "fp32").config == policy.config
    if has_experts:  # in one tensor, as some folders have them
        path = "model.language_model.layers.1.mlp.experts"
        each = [before.pop(f"{path}.{n}.down_proj.weight") for n in range(3)]
        save_file(before | {f"{path}.down_proj": torch.stack(each)}, source / WEIGHTS_FILE)
        assert torch.equal(
            load_policy(source, "fp32").masters["layers.1.experts.down_proj.weight"],
            torch.cat(each).float(),
        )


@pytest.mark.parametrize(("preset", "contents"), [("fp8", fp8_contents), ("int8", int8_contents)])
def test_an_export_in_8_bits_is_read_to_the_same_bits(
    made: Path, preset: str, contents: Any, tmp_path: Path
) -> None:
    policy = load_policy(made, preset)
    in_8_bits: Contents = contents(policy.config, policy.flow, PolicyTensors(policy))
    write_folder(tmp_path, policy.config, in_8_bits, made)
    again = load_policy(tmp_path, preset, trainable=False)
    assert torch.equal(logits_of(again, IDS), logits_of(policy, IDS))
    if preset == "fp8":  # which transformers reads as BF16 here
        torch.testing.assert_close(theirs(tmp_path), logits_of(again, IDS), atol=0.5, rtol=0)


def test_a_decoder_of_another_shape_is_written_alone(made: Path, tmp_path: Path) -> None:
    """As a run from scratch does that takes this folder's tokenizer."""
    config = replace(read_config(made), num_layers=1, windowless_layers=())
    save_policy(random_policy(config, "fp32", 0), tmp_path, made)
    assert read_config(tmp_path) == config
    names = load_file(tmp_path / WEIGHTS_FILE).keys()
    assert all(name.startswith("model.") for name in names)


@pytest.mark.parametrize("preset", ["fp32", "int8"])
def test_adapters_have_the_names_of_the_larger_model(
    made: Path, preset: str, tmp_path: Path
) -> None:
    """So that PEFT adds them to the decoder, and not to the tower's modules of the same names."""
    check_adapters(made, preset, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_experts", [False, True])
def test_so_have_those_of_delta_nets(has_experts: bool, tmp_path: Path) -> None:
    made = qwen(tmp_path / "qwen", has_experts)
    check_adapters(made, "fp32", tmp_path / "adapters")
    check_adapters(made, "fp32", tmp_path / "of_mlps", LORA_TARGETS[4:])


def check_adapters(
    made: Path, preset: str, folder: Path, targets: tuple[str, ...] | None = None
) -> None:
    config = read_config(made)
    config = replace(config, lora=Lora(4, 8.0, targets or config.lora_targets))
    masters = read_masters(made, config)
    policy = Policy(config, PrecisionConfig.model_validate(preset), masters)
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(torch.randn_like(master) * 0.05)
    policy.publish()
    stored = FolderCheckpoint.open(made, config)
    folded = folded_columns(config, policy.flow, stored.tensor)
    write_adapters(folder, policy.config.lora, made, peft_tensors(config, policy.masters, folded))  # type: ignore[arg-type]
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(made)})
    )
    assert torch.equal(logits_of(load_policy(folder, preset), IDS), logits_of(policy, IDS))
    if preset == "fp32":
        ours = logits_of(policy, IDS)
        torch.testing.assert_close(theirs(made, folder), ours, atol=1e-4, rtol=1e-4)
        assert (ours - theirs(made)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "the key 'text_config' is missing"),
        ({"text_config": [1]}, "text_config = .* expected an object"),
        ({"model_type": "gemma3_text"}, "model_type = 'gemma3_text'.* expected 'gemma3'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False .*text_config has True"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config.model_type = 'gemma2'"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "text_config.final_logit_softcapping"),
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "'Gemma3ForSequ.*supported are"),
    ],
)
def test_keys_are_refused_by_name(made: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((made / "config.json").read_text())
    for key, value in changes.items():
        is_text = isinstance(value, dict)
        config[key] = config[key] | value if is_text else value
    with pytest.raises(ModelError, match=f"^config.json: .*{message}"):
        ModelConfig.from_hf(config, "config.json")


def test_a_tensor_of_neither_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    before = load_file(made / WEIGHTS_FILE)
    norm = "language_model.model.norm.weight"
    for name, message in (
        ("audio_tower.x", "holds audio_tower.x, which a gemma3_text decoder does not read"),
        ("model.norm.weight", "model.norm.weight has a name that is not of a Gemma3ForCond"),
        ("model.language_model.norm.weight", "expected each tensor once"),
    ):
        folder = edited(made, tmp_path / "folder", before | {name: before[norm].clone()})
        with pytest.raises(ModelError, match=message):
            load_policy(folder, "fp32")
