"""Tensors go to a file and come back one by one, in the bytes that safetensors itself writes."""

import hashlib
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.models.tensor_file import TensorFile, write_tensors

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
