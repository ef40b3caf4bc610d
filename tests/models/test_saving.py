"""What a folder holds in BF16 and in FP8: the policy's own bytes, and what stock loaders read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isobit.config.tables import Family, PrecisionConfig
from isobit.models.config import Experts, ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.folder import load_policy
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import Contents, PolicyTensors, fp8_contents, save_policy, write_folder
from isobit.precision.quant_tensor import E4M3, QuantTensor, dequantise
from isobit.util.errors import ConfigError
from tests.models.policies import logits_of
from tests.tiny import save_tiny

WHOLE = ModelConfig("qwen3", 64, 128, 256, 2, 4, 4, 32, 128, 1e-6, 1e4, False)
"""Every matrix consists of whole blocks."""
NARROW_KEYS = replace(WHOLE, num_kv_heads=2)
"""K and V have 64 rows, Q has 128."""


def spread_policy(config: ModelConfig, precision: PrecisionConfig) -> Policy:
    """Random weights whose blocks have scales of many sizes."""
    policy = random_policy(config, precision, seed=4)
    with torch.no_grad():
        for master in policy.masters.values():
            if master.ndim == 2:
                rows = torch.arange(len(master)) // 32 % 7
                master.mul_(2.0 ** (rows - 1.0)[:, None])
            else:
                master.add_(torch.randn_like(master) * 0.1)
    policy.publish()
    return policy


def contents_of(policy: Policy) -> Contents:
    return fp8_contents(policy.config, policy.flow, PolicyTensors(policy))


def parts_of(policy: Policy, path: str) -> dict[str, QuantTensor]:
    """The published matrix of a linear, cut where the checkpoint's matrices end."""
    matrix = policy.weights("rollout").linears[path].matrix
    assert isinstance(matrix, QuantTensor)
    parts, row, block = {}, 0, 0
    for name, rows in build_decoder(policy.config).masters()[f"{path}.weight"].parts.items():
        blocks = -(-rows // 128)
        scales = matrix.scales[block : block + blocks]
        parts[name] = QuantTensor(matrix.values[row : row + rows], scales, "128x128")
        row, block = row + rows, block + blocks
    return parts


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
def test_the_bytes_are_those_that_the_policy_samples_with(scales: str) -> None:
    options = {"preset": "fp8-rollout", "scales": scales, "modules_bf16": ["layers.1.down_proj"]}
    policy = spread_policy(WHOLE, PrecisionConfig.model_validate(options))
    contents = contents_of(policy)
    compared = 0
    for site in policy.flow.rollout.sites:
        if site.kind != "linear" or site.forward != "e4m3":
            continue
        for name, part in parts_of(policy, site.name).items():
            values = contents.value(name)
            assert values.dtype == E4M3
            assert torch.equal(values.view(torch.uint8), part.values.view(torch.uint8))
            assert torch.equal(contents.value(f"{name}_scale_inv"), part.scales)
            compared += 1
    assert compared == 2 * 7 - 1
    kept = "model.layers.1.mlp.down_proj"
    assert torch.equal(
        contents.value(f"{kept}.weight"), policy.masters["layers.1.down_proj.weight"].bfloat16()
    )
    assert contents.quantization is not None
    skipped = contents.quantization["modules_to_not_convert"]
    assert skipped == ["model.embed_tokens", kept, "lm_head"]


def test_what_is_fused_with_a_part_that_is_not_whole_is_bf16_without_a_loss() -> None:
    policy = spread_policy(NARROW_KEYS, PrecisionConfig())
    contents = contents_of(policy)
    assert contents.quantization is not None
    for layer in range(2):
        for name, part in parts_of(policy, f"layers.{layer}.qkv_proj").items():
            assert name in contents.not_whole
            assert f"{name}_scale_inv" not in contents.layout
            assert name.removesuffix(".weight") in (contents.quantization["modules_to_not_convert"])
            assert torch.equal(contents.value(name).float(), dequantise(part))
    assert len(contents.not_whole) == 2 * 3
    assert contents.num_quantised == 2 * 4


def test_a_tied_head_is_skipped_by_name_and_has_no_tensor() -> None:
    contents = contents_of(
        random_policy(replace(WHOLE, tied_embeddings=True), PrecisionConfig(), 0)
    )
    assert contents.quantization is not None
    assert "lm_head" in contents.quantization["modules_to_not_convert"]
    assert "lm_head.weight" not in contents.layout


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("bf16", "no matrix in FP8.*bf16"),
        ("fp32", "no matrix in FP8.*bf16"),
        ("int8", "matrices in INT8 behind a Hadamard matrix.*bf16.*--precision fp8"),
        ("int8-linear", "matrices in INT8"),
    ],
)
def test_a_flow_without_fp8_is_refused(preset: str, why: str) -> None:
    policy = random_policy(WHOLE, PrecisionConfig.model_validate({"preset": preset}), 0)
    with pytest.raises(ConfigError, match=rf"flow {preset} samples with {why}"):
        contents_of(policy)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("config", [WHOLE, NARROW_KEYS], ids=["whole", "narrow keys"])
def test_transformers_loads_it_and_computes_what_we_do(
    family: Family, config: ModelConfig, tmp_path: Path
) -> None:
    """Its dequantised weights are our own, bit for bit, and its logits those of our FP32 decoder on
    them.
    """
    experts = Experts(3, 2, 256, True) if family in ("qwen3_moe", "mixtral") else None
    config = replace(config, family=family, experts=experts)
    policy = spread_policy(config, PrecisionConfig())
    write_folder(tmp_path, config, contents_of(policy), limit=200_000)
    assert not (tmp_path / WEIGHTS_FILE).exists(), "there are shards"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    ids = torch.randint(0, 64, (90,))
    with torch.no_grad():
        assert model(ids[None]).logits.isfinite().all(), "as it is loaded, in BF16"
    model = model.float()
    masters = stored_masters(tmp_path, config)
    if experts is None:  # transformers stacks those of experts
        theirs = model.state_dict()
        for name, master in build_decoder(config).masters().items():
            for part, rows in master.of_checkpoint(masters[name]).items():
                assert torch.equal(theirs.pop(part), rows), part
        assert not theirs
    ours = Policy(config, PrecisionConfig(preset="fp32"), masters)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(ours, ids), expected, atol=1e-3, rtol=0)


def test_a_router_is_skipped_and_each_expert_has_scales_of_its_own() -> None:
    config = replace(WHOLE, family="qwen3_moe", experts=Experts(3, 2, 256, True))
    policy = spread_policy(config, PrecisionConfig())
    contents = contents_of(policy)
    assert contents.quantization is not None
    skipped = contents.quantization["modules_to_not_convert"]
    assert [name for name in skipped if "layers" in name] == [
        "model.layers.0.mlp.gate", "model.layers.1.mlp.gate",
    ]  # fmt: skip
    for name, part in parts_of(policy, "layers.1.experts.gate_up_proj").items():
        assert contents.layout[f"{name}_scale_inv"].shape == (2, 1)
        assert torch.equal(contents.value(f"{name}_scale_inv"), part.scales)
        assert torch.equal(contents.value(name).view(torch.uint8), part.values.view(torch.uint8))


def stored_masters(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """FP32 masters from the files, dequantised by the definition."""
    files = sorted(folder.glob("*.safetensors"))

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    masters: dict[str, torch.Tensor] = {}
    for name, master in build_decoder(config).masters().items():
        parts = []
        for part in master.parts:
            values = tensors[part].float()
            if f"{part}_scale_inv" in tensors:
                scales = tensors[f"{part}_scale_inv"]
                values *= scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            parts.append(values)
        masters[name] = torch.cat(parts)
    return masters


def test_stops_of_config_json_are_carried_into_an_export(tmp_path: Path) -> None:
    """As transformers reads them, where there is no generation_config.json."""
    source = save_tiny(tmp_path / "source")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 16]}))
    save_policy(load_policy(source, "fp32"), tmp_path / "out", source)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [2, 16]
