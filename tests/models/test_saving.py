"""What a folder holds in BF16 and in FP8: the policy's own bytes, and what stock loaders read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.kernels.spec.quantise import dequantise_int8
from isobit.models.config import Experts, ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.families import FAMILIES
from isobit.models.folder import load_policy
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import (
    Contents,
    PolicyTensors,
    copy_tokenizer,
    fp8_contents,
    int8_contents,
    save_policy,
    write_folder,
)
from isobit.precision.quant_tensor import E4M3, Int8Rows, QuantTensor, dequantise, rotation_size
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError
from tests.models.policies import delta_nets, logits_of, small_experts
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
    policy = spread_policy(NARROW_KEYS, PrecisionConfig(preset="fp8"))
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
        random_policy(replace(WHOLE, tied_embeddings=True), PrecisionConfig(preset="fp8"), 0)
    )
    assert contents.quantization is not None
    assert "lm_head" in contents.quantization["modules_to_not_convert"]
    assert "lm_head.weight" not in contents.layout


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("bf16", "no matrix in FP8.*bf16"),
        ("fp32", "no matrix in FP8.*bf16"),
        ("int8", "matrices in INT8; export with --format int8.*bf16.*--precision fp8"),
        ("int8-linear", "matrices in INT8"),
    ],
)
def test_a_flow_without_fp8_is_refused(preset: str, why: str) -> None:
    policy = random_policy(WHOLE, PrecisionConfig.model_validate({"preset": preset}), 0)
    with pytest.raises(ConfigError, match=rf"flow {preset} samples with {why}"):
        contents_of(policy)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gpt_oss"])
@pytest.mark.parametrize("config", [WHOLE, NARROW_KEYS], ids=["whole", "narrow keys"])
def test_transformers_loads_it_and_computes_what_we_do(
    family: Family, config: ModelConfig, tmp_path: Path
) -> None:
    """Its dequantised weights are our own, bit for bit, and its logits those of our FP32 decoder on
    them.
    """
    experts, own = small_experts(family, 3, 256), delta_nets(family, config.num_layers)
    config = replace(config, family=family, experts=experts, **own)
    policy = spread_policy(config, PrecisionConfig(preset="fp8"))
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
    policy = spread_policy(config, PrecisionConfig(preset="fp8"))
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


MIXED = replace(WHOLE, intermediate_size=192, num_kv_heads=2)
"""down_proj is multiplied by 64 rows of the Hadamard matrix, the others by 128."""


def int8_contents_of(policy: Policy) -> Contents:
    return int8_contents(policy.config, policy.flow, PolicyTensors(policy))


def int8_parts_of(policy: Policy, path: str) -> dict[str, Int8Rows]:
    """As ``parts_of``."""
    matrix = policy.weights("rollout").linears[path].matrix
    assert isinstance(matrix, Int8Rows)
    parts, row = {}, 0
    for name, rows in build_decoder(policy.config).masters()[f"{path}.weight"].parts.items():
        parts[name] = matrix.rows(row, row + rows)
        row += rows
    return parts


@pytest.mark.parametrize("preset", ["int8", "int8-linear", "int8-rollout"])
def test_the_integers_are_those_that_the_policy_samples_with(preset: str) -> None:
    """Scales leave out 1 / sqrt(n) of 1 / n: by a power of two for 64 rows of the Hadamard matrix,
    and rounded once for 128.
    """
    options = {"preset": preset, "modules_bf16": ["layers.1.down_proj"]}
    policy = spread_policy(MIXED, PrecisionConfig.model_validate(options))
    contents = int8_contents_of(policy)
    sizes: list[int] = []
    for site in policy.flow.rollout.sites:
        if site.kind != "linear" or site.forward != "int8":
            continue
        for name, part in int8_parts_of(policy, site.name).items():
            values, scales = contents.value(name), contents.value(f"{name}_scale")
            sizes.append(rotation_size(values.shape[1]))
            assert values.dtype == contents.layout[name].dtype == torch.int8
            assert torch.equal(values, part.values)
            assert scales.shape == contents.layout[f"{name}_scale"].shape == (len(values), 1)
            if sizes[-1] == 64:
                assert torch.equal(scales[:, 0], part.scales * 8)
            else:
                exact = part.scales.double() * 128**0.5
                assert torch.equal(scales[:, 0], exact.float())
    assert sorted(sizes) == [64, *[128] * 12]
    assert contents.num_quantised == len(sizes)
    kept = "model.layers.1.mlp.down_proj"
    assert torch.equal(
        contents.value(f"{kept}.weight"), policy.masters["layers.1.down_proj.weight"].bfloat16()
    )
    assert contents.quantization is not None
    assert contents.quantization["ignore"] == ["model.embed_tokens", kept, "lm_head"]
    found = contents.quantization["transform_config"]["config_groups"]
    assert {name: group["head_dim"] for name, group in found.items()} == {
        "hadamard_64": 64,
        "hadamard_128": 128,
    }


def test_a_matrix_of_an_odd_size_has_no_transform() -> None:
    """No power of two divides it, so the Hadamard matrix in front of it is 1."""
    policy = spread_policy(replace(MIXED, intermediate_size=191), PrecisionConfig(preset="int8"))
    quantization = int8_contents_of(policy).quantization
    assert quantization is not None
    assert list(quantization["transform_config"]["config_groups"]) == ["hadamard_128"]


@pytest.mark.parametrize(
    ("family", "kept", "why"),
    [
        ("qwen2", [], r"layers\.0\.self_attn\.q_proj has a bias, and vLLM .*--format bf16"),
        ("qwen2", ["qkv_proj"], None),
        ("qwen3_moe", [], r"layers\.0\.mlp\.experts\.0\.gate_proj is an expert.*--format bf16"),
        ("mixtral", [], r"layers\.0\.block_sparse_moe\.experts\.0\.w1 is an expert"),
        ("mixtral", ["experts.gate_up_proj"], r"experts\.0\.w2 is an expert"),
        ("qwen3_next", [], r"layers\.0\.mlp\.experts\.0\.gate_proj is an expert"),
    ],
)
def test_what_vllm_does_not_multiply_by_a_hadamard_matrix_is_refused(
    family: Family, kept: list[str], why: str | None
) -> None:
    experts, own = small_experts(family, 3, 256), delta_nets(family, 2)
    options = {"preset": "int8", "modules_bf16": [name.rpartition(".")[2] for name in kept]}
    policy = random_policy(
        replace(WHOLE, family=family, experts=experts, **own),
        PrecisionConfig.model_validate(options),
        0,
    )
    if why is None:
        assert int8_contents_of(policy).num_quantised == 2 * 4
        return
    with pytest.raises(ConfigError, match=why):
        int8_contents_of(policy)


@pytest.mark.parametrize("preset", ["bf16", "fp8"])
def test_a_flow_without_int8_is_refused(preset: str) -> None:
    policy = random_policy(WHOLE, PrecisionConfig.model_validate({"preset": preset}), 0)
    with pytest.raises(ConfigError, match=rf"flow {preset} samples with no matrix in INT8.*int8"):
        int8_contents_of(policy)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_compressed_tensors_reads_it_and_computes_what_we_do(
    family: Family, tmp_path: Path
) -> None:
    """Weights decompressed by the library and inputs multiplied by its Hadamard matrix give the
    logits of our FP32 decoder on the numbers that the policy publishes; with its rounding of
    inputs, those of our flow.
    """
    pytest.importorskip("compressed_tensors", reason="`pip install compressed-tensors` reads INT8")
    from compressed_tensors.quantization import QuantizationConfig  # pyright: ignore
    from compressed_tensors.transform import (  # pyright: ignore
        TransformConfig,
        apply_transform_config,
    )

    config = replace(MIXED, family=family)
    options = {"preset": "int8-linear", "modules_bf16": ["layers.1.o_proj"]}
    policy = spread_policy(config, PrecisionConfig.model_validate(options))
    write_folder(tmp_path, config, int8_contents_of(policy), limit=100_000)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    ids = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        unrotated = model(ids[None]).logits[0]
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(stored).config_groups.values()
    assert scheme.weights.strategy == "channel" and not scheme.weights.dynamic
    assert scheme.input_activations.strategy == "token" and scheme.input_activations.dynamic
    apply_transform_config(model, TransformConfig.model_validate(stored["transform_config"]))
    with torch.no_grad():
        rounded = model(ids[None]).logits[0]

    masters = {name: master.bfloat16().float() for name, master in policy.masters.items()}
    theirs, compared = model.state_dict(), 0
    for path, linear in policy.weights("rollout").linears.items():
        if path == "layers.1.o_proj":
            continue
        assert isinstance(linear.matrix, Int8Rows)
        masters[f"{path}.weight"] = dequantise_int8(linear.matrix)
        for name, part in int8_parts_of(policy, path).items():
            root = rotation_size(part.values.shape[1]) ** 0.5
            scales = (part.scales.double() * root).float()[:, None]
            assert torch.equal(theirs[name], part.values * scales), name
            compared += 1
    assert compared == 2 * 7 - 1
    for module in model.modules():
        vars(module)["quantization_enabled"] = False
    with torch.no_grad():
        unrounded = model(ids[None]).logits[0]
    expected = logits_of(Policy(config, PrecisionConfig(preset="fp32"), masters), ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(unrounded, expected, atol=2e-5, rtol=0)

    ours, noise = logits_of(policy, ids), rms(unrounded - logits_of(policy, ids))
    print(
        f"{family}: rms of logits {rms(expected):.4f}; rounded inputs {noise:.4f} here and "
        f"{rms(rounded - expected):.4f} there, apart by {rms(rounded - ours):.4f}; without the "
        f"Hadamard matrix {rms(unrotated - expected):.4f}"
    )
    assert rms(rounded - expected) < 1.5 * noise
    assert rms(rounded - ours) < 2 * noise
    assert rms(unrotated - expected) > 10 * noise


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


def test_a_tokenizer_is_copied_without_places_of_a_machine(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(starter_folder(), source)
    target.mkdir()
    copy_tokenizer(source, target)
    path = source / "tokenizer_config.json"
    assert (target / path.name).read_bytes() == path.read_bytes()
    found = json.loads(path.read_text())
    places = {"name_or_path": "/home/somebody/model", "tokenizer_file": "~/.cache/tokenizer.json"}
    path.write_text(json.dumps(found | places))
    copy_tokenizer(source, target)
    assert json.loads((target / path.name).read_text()) == found
    path.write_text(json.dumps(found | {"name_or_path": "org/name"}))
    copy_tokenizer(source, target)
    assert (target / path.name).read_bytes() == path.read_bytes()
