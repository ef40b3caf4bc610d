"""Headers that lie: each way is refused by the file's and the tensor's name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import ModelError
from isobit.models.tensor_header import LARGEST_HEADER, StoredTensor, read_header, shown

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
