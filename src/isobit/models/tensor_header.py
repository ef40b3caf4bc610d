"""The header of a safetensors file, read strictly.

    8 bytes      length of the header, little-endian
    header       JSON: name -> dtype, shape, and where its bytes begin and end behind the header
    tensors      end to end: every byte belongs to one tensor

A header can lie in many ways, and each is refused by the file and the tensor's name: names that are
there twice (JSON parsers keep the last one in silence), offsets that overlap or leave a gap or do
not fit shape and format, a file that is shorter or longer than they say.  Names come from
strangers: messages show them as they can be printed.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.errors import ModelError, shown

LARGEST_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of a number.  Formats of less than a byte (F4, F6) are not read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header."""

    format: str
    """As the header names it: "BF16", "F8_E4M3" ..."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    end: int


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """A JSON object in which no key is there twice; raises ModelError, naming ``source``."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        raise ModelError(f"{source}: {shown(error)} is there twice; expected once") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not valid JSON: {shown(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source} holds a {type(value).__name__}, expected an object")
    return value


def read_header(data: memoryview, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of which ``data`` is all.  Raises ModelError, naming ``path``."""
    if len(data) < 8:
        raise _damaged(path, f"it has {len(data)} bytes, less than a header's length takes")
    length = struct.unpack("<Q", data[:8])[0]
    if length > min(LARGEST_HEADER, len(data) - 8):
        raise _damaged(
            path,
            f"its header is said to have {length:,} bytes, and the file has {len(data):,} "
            f"(a header has at most {LARGEST_HEADER:,})",
        )
    header = parse_json(bytes(data[8 : 8 + length]), f"{path} is damaged: its header")
    _check_metadata(header.pop("__metadata__", {}), path)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_tiling(tensors, 8 + length, len(data), path)
    return tensors


class _DuplicateError(Exception):
    """A key that is in one object twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        raise _DuplicateError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return made


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged: {what}; fetch or write it again")


def _check_metadata(metadata: object, path: Path) -> None:
    texts = metadata.values() if isinstance(metadata, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise _damaged(path, "its __metadata__ is no object of texts")


def _entry(path: Path, name: str, entry: object, data_begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{shown(name)} has not exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _SIZES:
        raise ModelError(
            f"{path}: {shown(name)} has the dtype {shown(kind)}, which is not read; a model's "
            "weights are F32, BF16, F16 or F64, or F8_E4M3 with scales"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise _damaged(path, f"{shown(name)} has a shape or data_offsets that are no sizes")
    begin, end = offsets
    if end - begin != math.prod(shape) * _SIZES[kind]:
        raise _damaged(
            path,
            f"{shown(name)} of the shape {tuple(shape)} in {kind} takes "
            f"{math.prod(shape) * _SIZES[kind]:,} bytes, and its offsets are {begin} and {end}",
        )
    return StoredTensor(kind, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(values: object) -> bool:
    """Whether these are integers from 0 to what a file can have."""
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in values)


def _check_tiling(
    tensors: Mapping[str, StoredTensor], begin: int, file_end: int, path: Path
) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    end, before = begin, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if tensor.begin != end:
            how = "overlaps" if tensor.begin < end else "leaves a gap behind"
            raise _damaged(path, f"{shown(name)} {how} {before}")
        end, before = tensor.end, shown(name)
    if end != file_end:
        how = "truncated" if end > file_end else "followed by bytes of no tensor"
        raise _damaged(
            path, f"it has {file_end:,} bytes and its header describes {end:,}: it is {how}"
        )
