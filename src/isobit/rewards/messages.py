"""The messages between a trainer and its grading processes.

    to the grader     frames: 8 bytes of length, and a pickle, since rows may hold anything
    to the trainer    lines: a JSON object each, at most ``LINE_LIMIT`` bytes

Nothing from a grader is unpickled, since it has run text that a model wrote. A pipe takes a line at
once, so that two processes may write to the same one.
"""

import json
import os
import pickle
import select
import struct
from collections.abc import Iterator
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


class FrameReader:
    """Frames of a pipe, none of which is waited for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unread = bytearray()

    def read(self) -> Iterator[Any]:
        """The frames that are whole after a read from the pipe, which poll has called readable.
        Raises EOFError if the trainer has ended.
        """
        chunk = os.read(self.descriptor, 1 << 16)
        if not chunk:
            raise EOFError
        self._unread += chunk
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                return
            payload = self._unread[_LENGTH.size : end]
            del self._unread[:end]
            yield pickle.loads(payload)  # noqa: S301  the trainer's own


class PipeWriter:
    """What is still to be written to a pipe, which is never waited for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unsent = bytearray()
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLOUT)

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def add(self, encoded: bytes) -> None:
        self._unsent += encoded

    def write(self) -> None:
        """Write as much as the pipe has room for.  Raises OSError if nobody reads it."""
        while self._unsent and self._poller.poll(0):
            # a pipe that is ready has room for so many bytes, also where writing may block
            del self._unsent[: os.write(self.descriptor, self._unsent[: select.PIPE_BUF])]

    def clear(self) -> None:
        self._unsent.clear()


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
