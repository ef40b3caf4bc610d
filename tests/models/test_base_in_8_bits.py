"""Folders in FP8 and INT8 as they are: under adapters, and where a policy only samples."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.commands.export import export, find_source
from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig, named_precision
from isobit.models.folder import load_policy, read_config, read_masters
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.precision.quant_tensor import E4M3, Int8Rows, QuantTensor
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.util.errors import ModelError
from tests.models.exactness_probe import packed, paged
from tests.models.test_adapters import ALL, LENGTHS, config_of, moved, tokens


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return written(tmp_path / "base")


def written(folder: Path, **sizes: int) -> Path:
    """In BF16, with a vocabulary that no matrix has as its rows, and a channel that stands out."""
    config = replace(config_of("llama", None, tied=False), vocab_size=160, **sizes)
    policy = random_policy(config, "fp32", seed=0)
    with torch.no_grad():
        policy.masters["layers.0.input_norm.weight"][3] = 40.0
    save_policy(policy, folder)
    return folder


def exported(base: Path, format: Any, target: Path) -> Path:
    precision = PrecisionConfig(preset=format)
    return export(find_source(base, None, lambda line: None), target, format, precision).folder


@pytest.fixture
def int8(base: Path, tmp_path: Path) -> Path:
    return exported(base, "int8", tmp_path / "int8")


class Made(TorchDispatchMode):
    """The formats and shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.dtype, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor):
                self.found.add((one.dtype, tuple(one.shape)))
        return result


def stored_matrix(stored: Mapping[str, torch.Tensor], policy: Policy, path: str) -> torch.Tensor:
    parts = policy.decoder.masters()[f"{path}.weight"].parts
    return torch.cat([stored[part].view(torch.uint8) for part in parts])


def loaded(folder: Path, preset: str) -> tuple[Policy, set[torch.dtype]]:
    """A policy with adapters, and the formats in which the base's matrices were ever made, alone
    or fused.
    """
    config = replace(read_config(folder), lora=ALL)
    with Made() as made:
        policy = moved(Policy(config, named_precision(preset), read_masters(folder, config)))
    described = policy.decoder.masters()
    shapes = set[tuple[int, ...]]()
    for master in described.values():
        if master.kind == "matrix" and master.parts:
            shapes |= {master.shape, *((rows, *master.shape[1:]) for rows in master.parts.values())}
    own = {policy.shapes[name] for name in policy.shapes}
    assert not shapes & own, "an adapter could be taken for a matrix"
    return policy, {dtype for dtype, shape in made.found if shape in shapes}


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_under_adapters_bytes_are_taken_over_and_no_number_of_a_matrix_is_ever_made(
    preset: str, tmp_path: Path
) -> None:
    base = written(tmp_path / "base", num_kv_heads=4, intermediate_size=256)  # whole blocks
    folder = exported(base, preset, tmp_path / preset)
    policy, formats = loaded(folder, preset)
    stored = load_file(folder / WEIGHTS_FILE)
    assert formats <= {E4M3, torch.int8, torch.uint8}
    assert set(policy.masters) == set(policy.shapes)
    for path, linear in policy.weights("training").linears.items():
        if "lora_" in path:
            continue
        assert isinstance(linear.matrix, Int8Rows if preset == "int8" else QuantTensor)
        values = linear.matrix.values.view(torch.uint8)
        assert torch.equal(values, stored_matrix(stored, policy, path))
        assert linear.matrix is policy.weights("rollout").linears[path].matrix
    ids = tokens(policy) % policy.config.num_drawn
    assert torch.equal(paged(policy, ids, LENGTHS), packed(policy, ids, LENGTHS))
    _, formats = loaded(base, preset)
    assert torch.float32 in formats, "the count sees the numbers of a base in BF16"


READ = """
import sys
from dataclasses import replace
from pathlib import Path
from benchmarks.loading import anonymous_bytes
from isobit.models.folder import read_config, read_masters
from tests.models.test_adapters import ALL

folder = Path(sys.argv[1])
masters = read_masters(folder, replace(read_config(folder), lora=ALL))
before, most, largest = anonymous_bytes(), 0, 0
for _, values in masters:
    most = max(most, anonymous_bytes() - before)
    held = values.values if hasattr(values, "scales") else values
    largest = max(largest, held.nbytes)
print(most, largest)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_a_folder_of_several_files_is_read_a_matrix_at_a_time(preset: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_heads": 16, "num_kv_heads": 16}
    base = written(tmp_path / "base", **sizes, num_layers=16)
    source = find_source(base, None, lambda line: None)
    precision, shard = PrecisionConfig(preset=preset), 10 << 20
    folder = export(source, tmp_path / preset, preset, precision, shard_bytes=shard).folder
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert stored > 60 << 20
    assert len(list(folder.glob("*.safetensors"))) > 6
    # a process of its own, because a process keeps what it has given back
    command = [sys.executable, "-c", READ, str(folder)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    most, largest = map(int, said.split())
    assert most < 3 * largest + (6 << 20) < stored / 4, (most, largest)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["int8", "int8-linear"])
def test_an_int8_folder_samples_what_its_model_does(preset: str, base: Path, int8: Path) -> None:
    """Integers are equal, and scales where sqrt(n) is a power of two; others in all but one unit
    of the last place.
    """
    policy = load_policy(int8, preset, trainable=False)
    own = load_policy(base, preset, trainable=False)
    assert not policy.masters
    for path, linear in policy.weights("rollout").linears.items():
        found, expected = linear.matrix, own.weights("rollout").linears[path].matrix
        assert isinstance(found, Int8Rows)
        assert isinstance(expected, Int8Rows)
        assert torch.equal(found.values, expected.values)
        units = found.scales.view(torch.int32) - expected.scales.view(torch.int32)
        assert int(units.abs().max()) <= (0 if path.endswith("down_proj") else 1)
    result = verify_policy(policy, VerifyOptions(prompts=3, samples=1, max_new_tokens=8))
    assert result.comparison.tokens_compared > 100
    assert result.comparison.tokens_differing == 0
    ids = tokens(policy) % policy.config.num_drawn
    found, expected = packed(policy, ids, LENGTHS), packed(own, ids, LENGTHS)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_5_moe_text", "qwen3_next"])
def test_so_does_that_of_a_mixture_whose_experts_are_in_bf16(
    family: Family, tmp_path: Path
) -> None:
    """Nothing says of experts that a Hadamard matrix is in front of them."""
    precision = PrecisionConfig(preset="int8", modules_bf16=("gate_up_proj", "down_proj"))
    base = random_policy(config_of(family, None, tied=False), "fp32", seed=0)
    save_policy(base, tmp_path / "base")
    source = find_source(tmp_path / "base", None, lambda line: None)
    export(source, tmp_path / "int8", "int8", precision)
    policy, own = (
        load_policy(tmp_path / folder, precision, trainable=False) for folder in ("int8", "base")
    )
    described, integers = policy.decoder.masters(), 0
    for path, linear in policy.weights("rollout").linears.items():
        found, expected = linear.matrix, own.weights("rollout").linears[path].matrix
        if isinstance(expected, Int8Rows):
            assert isinstance(found, Int8Rows)
            assert torch.equal(found.values, expected.values)
            assert torch.allclose(found.scales, expected.scales, rtol=2**-23, atol=0)
            integers += len(described[f"{path}.weight"].parts)
        else:
            assert torch.equal(found, expected)  # pyright: ignore[reportArgumentType]
    assert integers == {"qwen3_5_moe_text": 7, "qwen3_next": 6}.get(family, 8)
    ids = tokens(policy) % policy.config.num_drawn
    assert torch.equal(paged(policy, ids, LENGTHS), packed(policy, ids, LENGTHS))


@pytest.mark.parametrize(
    ("preset", "trainable"), [("int8", True), ("fp8", False), ("int8-rollout", False)]
)
def test_numbers_of_an_int8_folder_are_refused(preset: str, trainable: bool, int8: Path) -> None:
    with pytest.raises(ModelError, match=r"folder is in INT8.*train \[lora\].*exported from"):
        load_policy(int8, preset, trainable=trainable)


def test_an_int8_folder_is_not_exported_again(int8: Path, tmp_path: Path) -> None:
    source = find_source(int8, None, lambda line: None)
    with pytest.raises(ModelError, match="rounded already; name the run or folder"):
        export(source, tmp_path / "again", "bf16")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "pack-quantized"}, "format = 'pack-quantized' is not"),
        ({"transform_config": None}, "transform_config = None is not"),
        ({"config_groups": {}}, r"config_groups = \{\} is not"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .* is not"),
        ({"ignore": ["lm_head", "model.layers.0.mlp"]}, "ignore in config.json names its module"),
        ({"ignore": 3}, "ignore is 3, expected a list of modules"),
    ],
)
def test_other_layouts_of_compressed_tensors_are_refused(
    changes: dict[str, Any], reason: str, int8: Path
) -> None:
    edit(int8, **changes)
    with pytest.raises(ModelError, match=reason):
        load_policy(int8, "int8", trainable=False)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (f"{DOWN}_scale", None, "its scales .* are missing; expected F32 of the shape"),
        (f"{DOWN}_scale", torch.ones(128, 2), r"has \(128, 1\): a scale a row"),
        (f"{DOWN}_scale", torch.ones(128, 1).double(), "is F64; expected F32"),
        (f"{DOWN}_scale", torch.zeros(128, 1), "not positive and finite"),
        (f"{DOWN}_scale", torch.full((128, 1), torch.inf), "not positive and finite"),
        (DOWN, torch.zeros(128, 192).bfloat16(), "does not name its module in ignore; expected I8"),
        (DOWN, torch.zeros(128, 192).to(E4M3), "is of I8"),
        ("model.norm.weight", torch.ones(128).to(torch.int8), "it is no linear's matrix"),
    ],
)
def test_tensors_that_are_not_those_of_int8_are_refused(
    name: str, value: torch.Tensor | None, reason: str, int8: Path
) -> None:
    stored = load_file(int8 / WEIGHTS_FILE)
    stored.pop(name)
    if value is not None:
        stored[name] = value
    if name == DOWN and value is not None and value.dtype == torch.bfloat16:
        del stored[f"{DOWN}_scale"]
    if name == DOWN and value is not None and value.dtype == E4M3:
        del stored[f"{DOWN}_scale"]
        stored[f"{DOWN}_scale_inv"] = torch.ones(1, 2)
    if name == "model.norm.weight":
        stored[f"{name}_scale"] = torch.ones(128, 1)
    save_file(stored, int8 / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=reason):
        load_policy(int8, "int8", trainable=False)
