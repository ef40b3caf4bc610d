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
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

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
_ORDER = {dtype: place for place, dtype in enumerate(_FORMATS)}


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
    names = sorted(layout, key=lambda name: (_ORDER[layout[name].dtype], name))
    header = _header({name: layout[name] for name in names}, metadata)
    digest = hashlib.sha256(header)
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(header)

        def write(name: str, tensor: torch.Tensor) -> None:
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype), (
                f"{name} is not what the layout says"
            )
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            hashed = hashing.submit(digest.update, data)
            file.write(data)
            hashed.result()

        for name in names:
            write(name, value(name))
    return digest.hexdigest()


def _header(layout: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in layout.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file by name, each read from the disk when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor; none is read."""
        return {name: tuple(self._file.get_slice(name).get_shape()) for name in self._names}
