"""The messages between a trainer and its grading processes.

    to the grader     frames: 8 bytes of length, and a pickle, since rows may hold anything
    to the trainer    lines: a JSON object each, at most ``LINE_LIMIT`` bytes

Nothing from a grader is unpickled, since it has run text that a model wrote. A pipe takes a line at
once, so that two processes may write to the same one.
"""

import json
import os
import pickle
import struct
from typing import Any

LINE_LIMIT = 4096
"""PIPE_BUF of Linux."""
_LENGTH = struct.Struct(">Q")


def frame(content: Any) -> bytes:
    payload = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


def read_frame(descriptor: int) -> Any:
    """The next frame, waiting for it. Raises EOFError if the trainer has ended."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return pickle.loads(_read(descriptor, length))  # noqa: S301  the trainer's own


def line(content: dict[str, Any], text: str = "message") -> bytes:
    """A line; the text under the key ``text`` is cut until it fits."""
    encoded = json.dumps(content, allow_nan=False).encode() + b"\n"
    while len(encoded) > LINE_LIMIT:
        content = {**content, text: content[text][: len(content[text]) * 3 // 4]}
        encoded = json.dumps(content, allow_nan=False).encode() + b"\n"
    return encoded


def write_all(descriptor: int, encoded: bytes) -> None:
    while encoded:
        encoded = encoded[os.write(descriptor, encoded) :]


def _read(descriptor: int, length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = os.read(descriptor, min(length - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
