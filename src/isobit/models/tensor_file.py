"""safetensors files, written and read one tensor at a time: what they hold need not fit the host's
memory beside what else is there.

    8 bytes      length of the header, little-endian
    header       JSON: name -> dtype, shape, and where its bytes begin and end behind the header;
                 padded with spaces to 8 bytes
    tensors      end to end, by format in the order of ``_FORMATS``, the widest first, so that each
                 begins at a multiple of its width, and then by name

These are the bytes of safetensors' own ``save_file``, which copies everything to host memory before
it writes the first one.  They are hashed on their way to the disk: what is read later is compared
with what was meant, and nothing is read twice.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.errors import ModelError
from isobit.models.tensor_header import read_header

_FORMATS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _FORMATS.items()} | {
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Of what is read."""
_MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
_FLAGS = mmap.MAP_PRIVATE | _MAP_NORESERVE
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
"""What is written to a mapped tensor stays in the process; nothing is reserved for that, as a file
may be larger than the memory.
"""
_ORDER = {dtype: place for place, dtype in enumerate(_FORMATS)}


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Where everything lies in a file that is to be written."""

    header: bytes
    begins: Mapping[str, int]
    """Of each tensor's bytes in the file, in their order."""
    size: int
    """Bytes of the file."""

    @classmethod
    def of(
        cls, layout: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> "FilePlan":
        """Of tensors with these shapes and formats, which may be on the device ``meta``."""
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
    """Write ``value(name)`` for each name; -> the SHA-256 of the file.

    ``layout`` has tensors of the same shapes and formats, which may be on the device ``meta``;
    values are on any device.
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
    """Of a tensor on any device, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file by name.  The file is opened once and mapped: a tensor is its bytes
    there, read from the disk when they are looked at, and copied only where somebody writes to it.
    Mapped bytes are the file's pages in the system's cache and no memory of the process.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that cannot be read or is damaged."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), size, _FLAGS, _ACCESS) if size else b""
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        with memoryview(self._map) as data:
            self.stored = read_header(data, path)
        """What the header says of each tensor."""

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        dtype = DTYPES[stored.format]
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=dtype)
        count = (stored.end - stored.begin) // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.begin)
        return flat.view(stored.shape)

    def read_ahead(self, name: str) -> None:
        """Have the system begin to read a tensor from the disk, and return at once."""
        stored = self.stored[name]
        begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.end > begin and isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_WILLNEED, begin, stored.end - begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor; none is read."""
        return {name: stored.shape for name, stored in self.stored.items()}
