"""safetensors files and sharded folders, read strictly and written one tensor at a time, and
checksums of named tensors.

    8 bytes      length of the header, little-endian
    header       JSON: name -> dtype, shape, and where its bytes begin and end after the header;
                 padded with spaces to 8 bytes
    tensors      contiguous, ordered by format as in ``_FORMATS``, the widest first, so that each is
                 aligned to its width, and then by name

The written bytes are those of safetensors' ``save_file``, which would copy all tensors to host
memory first. They are hashed on their way to the disk. Several processes can write their rows of
the tensors into one file, with the same result.

A header from elsewhere can be wrong in many ways, and each is refused with the file and the
tensor's name: duplicate names (of which JSON parsers silently keep the last), offsets that overlap,
leave a gap or do not fit shape and format, a file that is shorter or longer than described.

    model.safetensors                       all tensors, if they fit
    model-00001-of-00003.safetensors, ...   or shards of a limited size, in the order of the
                                            forward; a matrix and its scales are in the same one
    model.safetensors.index.json            for shards: ``weight_map``, tensor -> file, and
                                            ``metadata.total_size``, bytes of all tensors
"""

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.noise import Rows
from isobit.util.errors import ModelError, shown
from isobit.util.plain_files import open_plain
from isobit.util.strict_json import json_text

LARGEST_HEADER = 100_000_000  # bytes, as in safetensors itself
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per number. Formats of less than a byte (F4, F6) are not read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    format: str
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    end: int


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ModelError, naming ``source``."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values, seen = dict(pairs), set[str]()
        if len(values) < len(pairs):
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ModelError(f"{source}: {shown(twice)} is there twice; expected once")
        return values

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not valid JSON: {shown(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source} holds a {type(value).__name__}, expected an object")
    return value


def read_header(data: memoryview, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file with the content ``data``. Raises ModelError, naming ``path``."""
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


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged: {what}; fetch or write it again")


def _check_metadata(metadata: object, path: Path) -> None:
    texts = metadata.values() if isinstance(metadata, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise _damaged(path, "its __metadata__ is no object of texts")


def _entry(path: Path, name: str, entry: object, data_begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{shown(name)} has not exactly dtype, shape and data_offsets")
    kind = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
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
    """Whether these are integers from 0 to the largest file size."""
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in values)


def _check_tiling(
    tensors: Mapping[str, StoredTensor], begin: int, file_end: int, path: Path
) -> None:
    """Every byte after the header belongs to exactly one tensor."""
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


_FORMATS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _FORMATS.items()} | {
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
_FLAGS = mmap.MAP_PRIVATE | _MAP_NORESERVE
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
"""Writes stay in the process, and no memory is reserved: a file may be larger than the memory."""
_ORDER = {dtype: place for place, dtype in enumerate(_FORMATS)}


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The layout of a file that is to be written."""

    header: bytes
    begins: Mapping[str, int]  # of each tensor's bytes in the file, in their order
    size: int  # bytes of the file

    @classmethod
    def of(
        cls, layout: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> "FilePlan":
        """The plan for tensors of these shapes and formats, which may be on the device ``meta``."""
        names = sorted(layout, key=lambda name: (_ORDER[layout[name].dtype], name))
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        begins: dict[str, int] = {}
        end = 0
        for name in names:
            tensor = layout[name]
            begins[name], end = end, end + tensor.numel() * tensor.element_size()
            entries[name] = {
                "dtype": _FORMATS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        begins = {name: len(header) + begin for name, begin in begins.items()}
        return cls(header, begins, len(header) + end)


def write_tensors(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write ``value(name)`` for each name; -> the SHA-256 of the file. ``layout`` has tensors of
    the same shapes and formats, which may be on the device ``meta``; values are on any device.
    """
    plan = FilePlan.of(layout, metadata)
    digest = hashlib.sha256(plan.header)
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(plan.header)

        def write(name: str, tensor: torch.Tensor) -> None:
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype), (
                f"{name} is not what the layout says"
            )
            data = bytes_of(tensor)
            hashed = hashing.submit(digest.update, data)
            file.write(data)
            hashed.result()

        for name in plan.begins:
            write(name, value(name))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file by name. The file is opened and mapped once: a tensor's bytes are read
    from the disk when they are accessed, and copied only when they are written to. Mapped bytes are
    in the system's page cache and take no memory of the process.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that cannot be read or is damaged."""
        self.path = path
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), size, _FLAGS, _ACCESS) if size else b""
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        with memoryview(self._map) as data:
            self.stored = read_header(data, path)

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        dtype = DTYPES[stored.format]
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=dtype)
        count = (stored.end - stored.begin) // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.begin)
        return flat.view(stored.shape)

    def read_ahead(self, name: str) -> None:
        """Have the system start reading a tensor from the disk, and return at once."""
        stored = self.stored[name]
        begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.end > begin and isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_WILLNEED, begin, stored.end - begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.stored.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a folder, not read yet."""

    name: str
    file: TensorFile

    @property
    def format(self) -> str:
        return self.file.stored[self.name].format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.stored[self.name].shape

    @property
    def num_bytes(self) -> int:
        return self.file.stored[self.name].end - self.file.stored[self.name].begin

    @property
    def mapped(self) -> torch.Tensor:
        """Its bytes in the file, read when they are accessed."""
        return self.file[self.name]

    def read_ahead(self) -> None:
        self.file.read_ahead(self.name)

    def __str__(self) -> str:
        return f"{self.file.path}: {shown(self.name)}"


_AT_ONCE = 1 << 30  # bytes of a write; Linux takes less than 2 GiB


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a tensor that is spread over several ranks."""

    shape: tuple[int, ...]  # of the whole tensor
    first: int  # the index of the first row
    rows: torch.Tensor  # [R, ...], R >= 0, on any device

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Slice":
        return cls(tuple(tensor.shape), 0, tensor)

    @classmethod
    def none(cls, tensor: torch.Tensor) -> "Slice":
        """No row of a tensor that another rank writes."""
        return cls(tuple(tensor.shape), 0, tensor.reshape(-1)[:0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.rows.element_size()


def plan_slices(slices: Mapping[str, Slice]) -> FilePlan:
    """The plan of the file with the whole tensors."""
    return FilePlan.of(
        {
            name: torch.empty(one.shape, dtype=one.rows.dtype, device="meta")
            for name, one in slices.items()
        }
    )


def create_file(path: Path, plan: FilePlan) -> None:
    """Write the header and set the file's size, after which any process may write its rows."""
    with path.open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.size)


def write_slices(
    path: Path, plan: FilePlan, slices: Mapping[str, Slice], beat: Callable[[], None]
) -> None:
    """Write these rows into a created file and sync it, calling ``beat`` after each tensor."""
    with path.open("r+b") as file:
        for name, begin in plan.begins.items():
            one = slices[name]
            if one.rows.numel():
                row = prod(one.shape[1:]) * one.rows.element_size()
                _write_at(file.fileno(), bytes_of(one.rows), begin + one.first * row)
                beat()
        os.fsync(file.fileno())


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:_AT_ONCE], place)
        data, place = data[written:], place + written


WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
SCALES_SUFFIX = "_scale_inv"  # appended to a matrix's name for its scales
INT8_SCALES_SUFFIX = "_scale"  # the same of a matrix in INT8

Layout = Mapping[str, torch.Tensor]
"""Tensors of a folder by name, as shapes and formats on the device ``meta``."""


def plan_shards(layout: Layout, limit: int = SHARD_BYTES) -> dict[str, list[str]]:
    """The names of each file's tensors, by the file's name; ``limit`` in bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for members in _kept_together(layout):
        more = sum(layout[name].nbytes for name in members)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1] += members
        size += more
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def write_order(layout: Layout, limit: int = SHARD_BYTES) -> list[str]:
    """The names in the order in which ``write_shards`` asks for their values."""
    return [
        name
        for names in plan_shards(layout, limit).values()
        for name in FilePlan.of({name: layout[name] for name in names}).begins
    ]


def write_shards(
    folder: Path, layout: Layout, value: Callable[[str], torch.Tensor], limit: int = SHARD_BYTES
) -> dict[str, str]:
    """Write ``value(name)`` for each name of the layout, one at a time, and the index if there are
    several files; -> the SHA-256 of each file of tensors.
    """
    shards = plan_shards(layout, limit)
    digests = {
        file: write_tensors(
            folder / file, {name: layout[name] for name in names}, value, {"format": "pt"}
        )
        for file, names in shards.items()
    }
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total_bytes(layout)},
            "weight_map": {
                name: file for file, names in sorted(shards.items()) for name in sorted(names)
            },
        }
        (folder / INDEX_FILE).write_text(json_text(index, indent=2) + "\n", encoding="utf-8")
    return digests


def total_bytes(layout: Layout) -> int:
    return sum(tensor.nbytes for tensor in layout.values())


def _kept_together(layout: Layout) -> list[list[str]]:
    """A matrix with its scales, in the order of the layout; every other tensor alone."""
    groups: dict[str, list[str]] = {}
    for name in layout:
        matrix = name.removesuffix(SCALES_SUFFIX).removesuffix(INT8_SCALES_SUFFIX)
        groups.setdefault(matrix, []).append(name)
    return list(groups.values())


def checksum(tensors: Iterable[tuple[str, Slice]]) -> int:
    """The checksum of rows of named tensors (``isobit.kernels.noise``), from 0 to 2^64 - 1 and 0
    for none, computed on the devices that hold them. The name seeds v_c of its tensor, so it is
    part of the checksum. It detects faults and edits, not deliberate forgery.

    Waits for each device once.
    """
    by_device: dict[torch.device, list[Rows]] = {}
    for name, rows in tensors:
        if rows.rows.numel():
            by_device.setdefault(rows.rows.device, []).append(placed(name, rows))
    return added_up(backend_of(device).checksum(rows) for device, rows in by_device.items())


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return checksum((name, Slice.whole(tensor)) for name, tensor in tensors.items())


def added_up(checksums: Iterable[int]) -> int:
    """The checksum of all rows together, from the checksums of disjoint sets of rows."""
    return sum(checksums) % (1 << 64)


def placed(name: str, of: Slice) -> Rows:
    """The rows, of which there is at least one, as a back end computes a checksum of them."""
    rows = of.rows.detach()
    row_bytes = rows.nbytes // len(rows) if rows.dim() else rows.nbytes
    return Rows(rows, of.first * row_bytes, _seed_of(name))


@cache
def _seed_of(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
