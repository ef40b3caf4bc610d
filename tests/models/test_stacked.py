"""Folders of gpt-oss: experts in one tensor a layer, in BF16 and in MXFP4, against transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.commands.export import export, find_source
from isobit.config.precision import PrecisionConfig
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import Experts, ModelConfig
from isobit.models.folder import load_policy, read_config
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.models.stacked import dequantised
from isobit.observe.inspection import inspect_folder
from isobit.parallel.world import ALONE, World
from isobit.util.errors import ConfigError, ModelError
from tests.models.policies import disturbed, logits_of
from tests.worlds import in_world

CONFIG = ModelConfig(
    *("gpt_oss", 64, 64, 96, 2, 4, 2, 16, 128, 1e-5, 1.5e5, False),
    experts=Experts(3, 2, 96, True),
    sliding_window=9,
    windowless_layers=(1,),
)
PREFIX = "model.layers.1.mlp.experts."


@pytest.fixture
def policy() -> Policy:
    return disturbed(random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0))


def theirs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits of a folder, in FP32."""
    from transformers import AutoModelForCausalLM  # here: it takes 2 s

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids[None]).logits[0]


def test_a_folder_goes_to_transformers_and_back(policy: Policy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_policy(policy, tmp_path / "ours")
    shapes = {name: tuple(one.shape) for name, one in load_file(files(tmp_path / "ours")).items()}
    assert shapes[f"{PREFIX}gate_up_proj"] == (3, 64, 192)
    assert shapes[f"{PREFIX}gate_up_proj_bias"] == (3, 192)
    assert shapes[f"{PREFIX}down_proj"] == (3, 96, 64)
    assert shapes[f"{PREFIX}down_proj_bias"] == (3, 64)
    assert not any(".experts.0" in name for name in shapes)
    loaded, ids = load_policy(tmp_path / "ours", PrecisionConfig(preset="fp32")), torch.arange(50)
    assert loaded.config == CONFIG
    for name, master in policy.masters.items():
        assert torch.equal(loaded.masters[name], master.bfloat16().float()), name
    expected = theirs(tmp_path / "ours", ids)
    torch.testing.assert_close(logits_of(loaded, ids), expected, rtol=1e-4, atol=1e-4)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = load_policy(tmp_path / "theirs", PrecisionConfig(preset="fp32"))
    assert all(torch.equal(again.masters[n], one) for n, one in loaded.masters.items())


def save_as(world: World, folder: str) -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0, world=world)
    save_policy(policy, Path(folder), limit=100_000)


@pytest.mark.exhaustive
def test_several_processes_write_the_folder_of_one(tmp_path: Path) -> None:
    """Which gather its masters in the order in which rank 0 writes their stacks."""
    save_as(ALONE, str(tmp_path / "one"))
    in_world(3, "tests.models.test_stacked:save_as", str(tmp_path / "three"))
    names = sorted(one.name for one in (tmp_path / "one").iterdir())
    assert len(names) > 4 and names == sorted(one.name for one in (tmp_path / "three").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def files(folder: Path) -> Path:
    return folder / "model.safetensors"


def packed(folder: Path) -> dict[str, torch.Tensor]:
    """Write random MXFP4 in place of a folder's matrices of experts; -> its tensors."""
    tensors = load_file(files(folder))
    generator = torch.Generator().manual_seed(3)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        size = experts, rows, columns // 32
        drawn = torch.randint(0, 256, (*size, 16), generator=generator)
        tensors[f"{name}_blocks"] = drawn.to(torch.uint8)
        scales = torch.randint(118, 124, size, generator=generator)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, files(folder), {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_mxfp4_is_dequantised_as_transformers_does(policy: Policy, tmp_path: Path) -> None:
    """All bytes, from the smallest factor to beyond the largest."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256).to(torch.uint8).view(1, 8, 2, 16)
    for byte in (1, 100, 127, 140, 250):
        scales = torch.full((1, 8, 2), byte, dtype=torch.uint8)
        ours = dequantised(blocks[0], scales[0])
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
        assert torch.equal(ours, expected) and torch.equal(ours, ours.bfloat16().float())
    assert dequantised(blocks[0], torch.full((8, 2), 255, dtype=torch.uint8)).isnan().all()

    save_policy(policy, tmp_path)
    tensors = packed(tmp_path)
    loaded = load_policy(tmp_path, PrecisionConfig(preset="fp32"))
    for matrix in ("gate_up_proj", "down_proj"):
        pair = tensors[f"{PREFIX}{matrix}_blocks"], tensors[f"{PREFIX}{matrix}_scales"]
        whole = convert_moe_packed_tensors(*pair, dtype=torch.float32).transpose(1, 2)
        if matrix == "gate_up_proj":
            whole = torch.cat([whole[:, 0::2], whole[:, 1::2]], 1)
        assert torch.equal(loaded.masters[f"layers.1.experts.{matrix}.weight"], whole.flatten(0, 1))


def test_a_folder_in_mxfp4_is_exported_in_bf16(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "mxfp4").mkdir()
    save_policy(policy, tmp_path / "mxfp4")
    packed(tmp_path / "mxfp4")
    export(find_source(tmp_path / "mxfp4", None, print), tmp_path / "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    before, after = (
        load_policy(tmp_path / name, PrecisionConfig(preset="fp32")) for name in ("mxfp4", "bf16")
    )
    assert all(torch.equal(after.masters[name], one) for name, one in before.masters.items())
    ids = torch.arange(50)
    expected = theirs(tmp_path / "bf16", ids)
    torch.testing.assert_close(logits_of(after, ids), expected, rtol=1e-4, atol=1e-4)
    source = find_source(tmp_path / "mxfp4", None, print)
    for form in ("fp8", "int8"):
        with pytest.raises(ConfigError, match="--format bf16"):
            export(source, tmp_path / form, form)


def test_what_a_folder_holds_is_counted_as_it_is_stored(policy: Policy, tmp_path: Path) -> None:
    save_policy(policy, tmp_path)
    packed(tmp_path)
    found = inspect_folder(tmp_path, PrecisionConfig(preset="bf16"))
    sizes = {one.format: (one.tensors, one.numbers, one.num_bytes) for one in found.formats}
    numbers = 2 * 3 * 3 * 64 * 96
    assert sizes["MXFP4"] == (2 * 3 * 3, numbers, numbers * 17 // 32)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"gate_up_proj_blocks": None}, {}, "gate_up_proj_blocks is missing; config.json says MX"),
        ({"down_proj_scales": None}, {}, "down_proj_scales is missing"),
        ({"down_proj_bias": None}, {}, "down_proj_bias is missing"),
        ({"extra": torch.zeros(1)}, {}, "experts.extra, which a gpt_oss decoder does not read"),
        (
            {"down_proj_blocks": torch.zeros(3, 64, 2, 16, dtype=torch.uint8)},
            {},
            r"down_proj_blocks is U8 of the shape \(3, 64, 2, 16\).* \(3, 64, 3, 16\) in U8, of MX",
        ),
        ({"down_proj_scales": torch.zeros(3, 64, 3)}, {}, "down_proj_scales is F32 of the shape"),
        (
            {"down_proj_scales": torch.full((3, 64, 3), 255, dtype=torch.uint8)},
            {},
            "down_proj_blocks holds a NaN",
        ),
        ({}, {"quantization_config": None}, "gate_up_proj is missing; config.json has no quanti"),
        (
            {},
            {"quantization_config": {"quant_method": "mxfp4", "bits": 4}},
            "quantization_config has bits = 4",
        ),
        ({}, {"quantization_config": {"quant_method": "mxfp8"}}, "quant_method = 'mxfp8'"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    changes: dict[str, Any], config: dict[str, Any], message: str, policy: Policy, tmp_path: Path
) -> None:
    save_policy(policy, tmp_path)
    tensors = packed(tmp_path)
    for name, tensor in changes.items():
        tensors.pop(f"{PREFIX}{name}", None)
        if tensor is not None:
            tensors[f"{PREFIX}{name}"] = tensor
    save_file(tensors, files(tmp_path), {"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path, PrecisionConfig(preset="fp32"))


def test_mxfp4_of_another_family_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, family="mixtral", sliding_window=None, windowless_layers=())
    save_policy(random_policy(config, PrecisionConfig(preset="fp32"), seed=0), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="MXFP4 is read for experts of gpt-oss alone"):
        FolderCheckpoint.open(tmp_path, read_config(tmp_path))
