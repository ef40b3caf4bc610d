"""Messages between processes: what JSON can hold, with tensors in it, as bytes.

    8 bytes      length of the JSON, little-endian
    JSON         the value; a tensor stands there as {"tensor": number}
    safetensors  the tensors by number

No code travels: a message that is not one of these is an error, whoever sent it.  Floats keep their
bits (JSON's shortest decimals), NaN and infinities too; tuples arrive as lists.
"""

import json
import struct
from typing import Any

import torch
from safetensors.torch import load, save

_TENSOR = "tensor"


def encode(value: Any) -> bytes:
    """A value of None, bool, int, float, str, lists, tuples, dicts with names for keys, and
    tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors), separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + save(tensors)


def decode(data: bytes) -> Any:
    """What ``encode`` was given, tensors on the host."""
    (length,) = struct.unpack_from("<Q", data)
    tensors = load(data[8 + length :])
    return _whole(json.loads(data[8 : 8 + length]), tensors)


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        number = str(len(tensors))
        tensors[number] = value.detach().cpu().contiguous()
        return {_TENSOR: number}
    if isinstance(value, dict):
        assert value.keys() != {_TENSOR}, "this name stands for tensors"
        return {key: _plain(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, tensors) for one in value]
    return value


def _whole(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _whole(one, tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one, tensors) for one in value]
    return value
