"""Values between the process of the tests and the process of a model's code.

A message is 4 bytes of length, big-endian, and JSON. Decoded values are of exactly the builtin
types, so that no ``__eq__`` of the sender takes part in a comparison:

    None, bool, str, small int   as JSON has them
    ["i", hex]                   int            ["f", hex]         float
    ["c", hex, hex]              complex        ["b", hex]         bytes, "B" bytearray
    ["l", ..], ["t", ..]         list, tuple    ["s", ..]          set, "z" frozenset
    ["d", [key, value], ..]      dict           ["D", text]        Decimal
    ["F", hex, hex]              Fraction       ["r", number]      an object that is not sent

Subclasses (a named tuple, a defaultdict) are sent as their builtin base type.
"""

import json
import os
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

MOST_BYTES = 8 << 20
DEEPEST = 100
SMALL = 1 << 53

Keep = Callable[[Any], list[Any]]
"""Gives the reference to send for an object that is not a plain value."""
Find = Callable[[int], Any]
"""Gives the object, or its stand-in, for a received number."""


class WireError(Exception):
    """A value that cannot be sent, or bytes that are no message."""


def encode(value: Any, keep: Keep, depth: int = 0) -> Any:
    """``value`` as JSON. Raises WireError beyond DEEPEST levels, and what ``keep`` raises."""
    if depth > DEEPEST:
        raise WireError(f"a value is nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if (scalar := _scalar(value)) is not None:
        return scalar
    if isinstance(value, dict):
        return [
            "d",
            *(
                [encode(key, keep, depth + 1), encode(item, keep, depth + 1)]
                for key, item in dict.items(value)
            ),
        ]
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return [tag, *(encode(item, keep, depth + 1) for item in value)]
    return keep(value)


def _scalar(value: Any) -> Any:
    match value:
        case str():
            return str.__str__(value)
        case int():
            number = int.__int__(value)
            return number if -SMALL < number < SMALL else ["i", hex(number)]
        case float():
            return ["f", float.hex(float.__float__(value))]
        case complex():
            return ["c", float.hex(value.real), float.hex(value.imag)]
        case bytes():
            return ["b", bytes.hex(value)]
        case bytearray():
            return ["B", bytearray.hex(value)]
        case Decimal():
            return ["D", Decimal.__str__(value)]
        case Fraction():
            return ["F", hex(value.numerator), hex(value.denominator)]
    return None


def decode(message: Any, find: Find) -> Any:
    """The value that ``encode`` encoded. Raises WireError for anything else."""
    try:
        return _decode(message, find, 0)
    except WireError:
        raise
    except (TypeError, ValueError, ArithmeticError, InvalidOperation, RecursionError) as error:
        raise WireError(f"what was received is no value: {type(error).__name__}") from error


_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "b": bytes.fromhex,
    "B": bytearray.fromhex,
    "D": Decimal,
    "F": lambda above, below: Fraction(int(above, 16), int(below, 16)),
}
_CONTAINERS = {"l": list, "t": tuple, "s": set, "z": frozenset}


def _decode(message: Any, find: Find, depth: int) -> Any:
    if depth > DEEPEST:
        raise WireError(f"a value is nested more than {DEEPEST} levels deep")
    if not isinstance(message, list):
        if isinstance(message, dict | float):
            raise WireError("what was received is no value")
        return message
    tag, *rest = message
    if tag in _SCALARS:
        return _SCALARS[tag](*rest)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_decode(item, find, depth + 1) for item in rest)
    if tag == "d":
        return {_decode(key, find, depth + 1): _decode(item, find, depth + 1) for key, item in rest}
    if tag == "r" and len(rest) == 1 and type(rest[0]) is int:
        return find(rest[0])
    raise WireError("what was received is no value")


class Channel:
    """Messages over two descriptors.

    The functions are bound on creation, before a model's code can replace them. This protects the
    channel only; the verdict never passes through it.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self._read, self._write = os.read, os.write
        self._loads, self._dumps = json.loads, json.dumps

    def send(self, message: Any) -> None:
        """Raises WireError for a message of more than MOST_BYTES, OSError if nobody reads."""
        data = self._dumps(message).encode("ascii")
        if len(data) > MOST_BYTES:
            raise WireError(f"a message of {len(data)} bytes; the most are {MOST_BYTES}")
        data = struct.pack(">I", len(data)) + data
        while data:
            data = data[self._write(self.outgoing, data) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end, WireError for an invalid one."""
        (length,) = struct.unpack(">I", self._exactly(4))
        if length > MOST_BYTES:
            raise WireError(f"a message of {length} bytes; the most are {MOST_BYTES}")
        try:
            return self._loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise WireError("what was received is no JSON") from error

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._read(self.incoming, min(count, 1 << 16))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
