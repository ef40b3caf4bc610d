"""A folder's tensors over its files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.models.shards import INDEX_FILE, WEIGHTS_FILE, plan_shards, total_bytes, write_shards

FP32 = PrecisionConfig(preset="fp32")


def layout(**sizes: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()
    }


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ({"a": 5, "b": 5}, 10, [["a", "b"]]),
        ({"a": 5, "b": 5, "c": 1}, 10, [["a", "b"], ["c"]]),
        ({"a": 1, "b": 50, "c": 1}, 10, [["a"], ["b"], ["c"]]),
        ({"b": 9, "a": 9}, 10, [["b"], ["a"]]),
        ({"x": 4, "w": 5, "w_scale_inv": 3}, 10, [["x"], ["w", "w_scale_inv"]]),
    ],
)
def test_a_shard_is_filled_in_order_and_a_matrix_keeps_its_scales(
    sizes: dict[str, int], limit: int, expected: list[list[str]]
) -> None:
    planned = plan_shards(layout(**sizes), limit)
    assert list(planned.values()) == expected
    count = len(expected)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert list(planned) == ([WEIGHTS_FILE] if count == 1 else names)


def test_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(n)) for n, name in enumerate("cab")}
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    digests = write_shards(tmp_path, planned, tensors.__getitem__, limit=32)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": total_bytes(planned)} == {"total_size": 48}
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == digests.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_transformers_and_we_read_the_same_of_shards_as_of_one_file(tmp_path: Path) -> None:
    config = ModelConfig("qwen3", 64, 128, 256, 2, 4, 2, 32, 128, 1e-6, 1e4, False)
    policy = random_policy(config, FP32, seed=3)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    save_policy(policy, whole)
    save_policy(policy, shards, limit=200_000)
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert not (shards / WEIGHTS_FILE).exists()
    ours = (load_policy(folder, FP32).masters for folder in (whole, shards))
    theirs = (
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).state_dict()
        for folder in (whole, shards)
    )
    for one, other in (ours, theirs):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
