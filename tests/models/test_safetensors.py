"""A folder's tensors over its files.

Tensors go to a file and come back one by one, in the bytes that safetensors itself writes.

Headers that lie: each way is refused by the file's and the tensor's name.
"""

import hashlib
import json
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy
from isobit.models.policy import random_policy
from isobit.models.safetensors import (
    INDEX_FILE,
    LARGEST_HEADER,
    WEIGHTS_FILE,
    StoredTensor,
    TensorFile,
    plan_shards,
    read_header,
    shown,
    total_bytes,
    write_shards,
    write_tensors,
)
from isobit.models.saving import save_policy
from isobit.util.errors import ModelError

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


TENSORS = {
    "layers.1.weight": torch.randn(5, 3).bfloat16(),
    "layers.0.step": torch.tensor(7.0),
    "layers.0.é": torch.randn(9),
    "transposed": torch.randn(4, 6).t(),
    "one": torch.randn(1, 1).bfloat16(),
    "codes": torch.randn(7).to(torch.float8_e4m3fn),
    "a byte": torch.tensor([5], dtype=torch.uint8),
    "ids": torch.arange(3, dtype=torch.int32),
    "versions": torch.arange(5),
    "rewards": torch.randn(3, dtype=torch.float64),
    "truncated": torch.tensor([True, False, True]),
    "z": torch.arange(200, dtype=torch.uint8),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    digest = write_tensors(ours, TENSORS, TENSORS.__getitem__, metadata)
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, theirs, metadata)
    assert ours.read_bytes() == theirs.read_bytes()
    assert digest == hashlib.sha256(theirs.read_bytes()).hexdigest()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load_file(ours).items())


def test_at_most_two_values_are_held_at_once(tmp_path: Path) -> None:
    last: list[weakref.ref[np.ndarray]] = []

    def value(name: str) -> torch.Tensor:
        assert len(last) < 2 or last[-2]() is None, (
            "the thread that hashes may still hold the one before, not those before it"
        )
        tensor = TENSORS[name]
        memory = np.empty(tensor.numel() * tensor.element_size(), dtype=np.uint8)
        last.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(tensor.dtype).reshape(tensor.shape)

    write_tensors(
        tmp_path / "file", {name: tensor.to("meta") for name, tensor in TENSORS.items()}, value
    )
    assert len(last) == len(TENSORS)


def test_a_file_is_a_mapping_that_reads_what_it_is_asked_for(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS, TENSORS.__getitem__)
    file = TensorFile(tmp_path / "file")
    assert file.keys() == TENSORS.keys() and "two" not in file
    assert file.shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert all(
        torch.equal(file[name], tensor) and file[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )
    with pytest.raises(KeyError):
        file["two"]


def test_another_value_than_the_layout_says_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="one is not what the layout says"):
        write_tensors(
            tmp_path / "file", {"one": torch.zeros(2, device="meta")}, lambda _: torch.zeros(3)
        )


PATH = Path("weights.safetensors")
A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def file_of(header: object, data: int = 32) -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + bytes(data))


def test_what_is_stored() -> None:
    file = file_of({"__metadata__": {"format": "pt"}, "a": A, "b": B})
    begin = len(file) - 32
    assert read_header(file, PATH) == {
        "a": StoredTensor("F32", (2, 3), begin, begin + 24),
        "b": StoredTensor("BF16", (4,), begin + 24, begin + 32),
    }
    assert read_header(file_of({}, data=0), PATH) == {}


def test_a_scalar_and_an_empty_tensor_have_their_places() -> None:
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]}
    found = read_header(file_of({"empty": empty, "scalar": scalar}, data=4), PATH)
    assert found["scalar"].shape == () and found["empty"].shape == (0, 7)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (memoryview(b""), "is damaged: it has 0 bytes"),
        (memoryview(b"\0" * 7), "is damaged: it has 7 bytes"),
        (memoryview(struct.pack("<Q", 9) + b"{}"), "header is said to have 9 bytes"),
        (memoryview(b"\xff" * 64), "header is said to have 18,446,744,073,709,551,615 bytes"),
        (file_of(b"{"), "its header is not valid JSON"),
        (file_of(b"\xff\xfe"), "its header is not valid JSON"),
        (file_of(b"[" * 100_000), "its header is not valid JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "its header is not valid JSON"),
        (file_of([A]), "holds a list"),
        (file_of({"__metadata__": {"format": 1}, "a": A, "b": B}), "__metadata__"),
        (file_of({"__metadata__": None, "a": A, "b": B}), "__metadata__"),
        (file_of({"a": A, "b": B}, data=31), r"it is truncated"),
        (file_of({"a": A, "b": B}, data=33), "followed by bytes of no tensor"),
        (
            file_of(f'{{"a": {json.dumps(A)}, "b": {json.dumps(B)}, "a": 1}}'.encode()),
            "a is there twice",
        ),
    ],
    ids=range(14),
)
def test_files_that_are_damaged(file: memoryview, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_header(file, PATH)
    assert "weights.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_offsets": [16, 24]}, "b overlaps a"),
        ({"data_offsets": [25, 33]}, "b leaves a gap behind a"),
        ({"data_offsets": [0, 8]}, "overlaps b"),
        ({"data_offsets": [24, 33]}, r"b of the shape \(4,\) in BF16 takes 8 bytes"),
        ({"data_offsets": [32, 24]}, "takes 8 bytes"),
        ({"data_offsets": [24]}, "no sizes"),
        ({"data_offsets": [24.0, 32.0]}, "no sizes"),
        ({"data_offsets": [-8, 0]}, "no sizes"),
        ({"data_offsets": "ab"}, "no sizes"),
        ({"data_offsets": [1 << 64, (1 << 64) + 8]}, "no sizes"),
        ({"shape": [5]}, "takes 10 bytes"),
        ({"shape": [-2, -2]}, "no sizes"),
        ({"shape": [True, 4]}, "no sizes"),
        ({"shape": 4}, "no sizes"),
        ({"shape": [1 << 62] * 8}, "takes"),
        ({"shape": [4] + [1] * 8}, "no sizes"),
        ({"dtype": "F4"}, "dtype F4, which is not read"),
        ({"dtype": ["BF16"]}, "is not read"),
        ({"dtype": "F32"}, "takes 16 bytes"),
        ({"stride": [1]}, "not exactly dtype, shape and data_offsets"),
    ],
)
def test_entries_that_lie(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_header(file_of({"a": A, "b": B | changes}), PATH)
    assert "weights.safetensors" in str(caught.value)


@pytest.mark.parametrize("entry", [None, 7, [], "F32", {}])
def test_an_entry_that_is_none(entry: object) -> None:
    with pytest.raises(ModelError, match="a has not exactly dtype"):
        read_header(file_of({"a": entry}), PATH)


def test_a_header_of_more_than_the_limit_is_not_parsed() -> None:
    length = LARGEST_HEADER + 1
    with pytest.raises(ModelError, match="at most 100,000,000"):
        read_header(memoryview(struct.pack("<Q", length) + bytes(length)), PATH)


def test_names_in_messages_are_printable_and_short() -> None:
    assert shown("model.norm.weight") == "model.norm.weight"
    assert shown("\x1b[31mred\n") == r"'\x1b[31mred\n'"
    assert shown("\ud800") == r"'\ud800'"
    assert len(shown("a" * 10_000)) == 203
    with pytest.raises(ModelError) as caught:
        read_header(file_of({"\x1b]0;title\x07": 1}), PATH)
    assert str(caught.value).isprintable()
