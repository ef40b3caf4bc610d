"""Files of strangers, mutated: what is done to them, and what became of the reading.

``ISOBIT_MUTATIONS`` says how many of each kind; 300 by default.  ``Outcomes`` counts them, and its
line is printed (``pytest -s``).  A traceback is any exception but the error that is asked for, and
fails the test where it happens, as does a reading that was accepted and gave something else.
"""

import copy
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.util.errors import IsobitError

COUNT = int(os.environ.get("ISOBIT_MUTATIONS", "300"))
LONGEST_MESSAGE = 4100
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**30, 1.5, float("nan"), "", "F32", "I8", "\x1b[31m", "\ud800",
    "../x.safetensors", "/etc/passwd", [], [0], [[1]], {}, {"a": 1},
)  # fmt: skip


@dataclass(slots=True)
class Outcomes:
    """Of one kind of file."""

    kind: str
    refused: int = 0
    same: int = 0
    """Accepted, and what it was before, or what its bytes say by another reader."""
    other: int = 0
    """Accepted, of the same shapes and types, and with other values: the format has no checksum."""

    def refuses(self, read: Callable[[], object], expected: type[IsobitError]) -> bool:
        """Whether it was refused, by a message that says so and can be printed.  One that was not
        is counted as the same: the test checks that it is.
        """
        try:
            read()
        except expected as error:
            text = str(error)
            assert text.replace("\n", "").isprintable() and 0 < len(text) < LONGEST_MESSAGE
            self.refused += 1
            return True
        self.same += 1
        return False

    def differs(self) -> None:
        """The last one that was accepted has other values."""
        self.same, self.other = self.same - 1, self.other + 1

    def check(self, least: float, most: float = 1.0) -> None:
        """The share that was refused: mutations that touch nothing would show nothing."""
        total = self.refused + self.same + self.other
        print(
            f"\nmutations of {self.kind}: {total}; {self.refused} refused, {self.same} accepted as "
            f"they are, {self.other} with other values, 0 of other shapes, types or sizes, 0 "
            "tracebacks, 0 hangs"
        )
        assert total == COUNT
        if total >= 300:
            assert least * total < self.refused < most * total


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, taken out, put in, repeated or cut off."""
    made = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(made) + 1)
        to = min(len(made), at + draw.randint(1, 8))
        kind = draw.randrange(5)
        if kind == 0 and at < len(made):
            made[at] = draw.randrange(256)
        elif kind == 1:
            del made[at:to]
        elif kind == 2:
            made[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3:
            made[at:at] = made[at:to] * draw.randint(1, 3)
        elif kind == 4 and draw.random() < 0.1:
            del made[at:]
    return bytes(made)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """One place of a JSON value another value, a key renamed, or an entry gone."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        kind = draw.randrange(6)
        rest = {name: one for name, one in value.items() if name != key}
        if kind == 0:
            return rest
        if kind == 1:
            return rest | {f"{key}{draw.choice(['', '.', ' ', '0', chr(27)])}": value[key]}
        if kind == 2:
            return value | {key: value[draw.choice(list(value))]}
        return value | {key: mutated_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], mutated_json(value[at], draw), *value[at + 1 :]]
    if type(value) is int and draw.random() < 0.8:
        return draw.choice([value + 1, value - 1, value * 2, -value, value + 8])
    if draw.random() < 0.05:  # as text: a reader of JSON may give up on it, a writer too
        return draw.choice(["[" * 2000 + "]" * 2000, "1" * 5000])
    return draw.choice(VALUES)


def mutated_json_text(content: bytes, draw: random.Random) -> bytes:
    """A JSON file with one value changed, or some bytes, or nested beyond all bounds."""
    if draw.random() < 0.4:
        return mutated_bytes(content, draw)
    text = json.dumps(mutated_json(json.loads(content), draw))
    if draw.random() < 0.05:
        deep, long = "[" * 100_000 + "]" * 100_000, "1" * 5000
        text = text.replace("0", draw.choice([deep, long]), 1)
    return text.encode()


def _twice(content: bytes, draw: random.Random) -> bytes:
    """A key of the outermost object a second time, with another value."""
    found = json.loads(content)
    if not isinstance(found, dict) or not found:
        return content
    key, value = json.dumps(draw.choice(list(found))), json.dumps(draw.choice(VALUES))
    return b"{" + f"{key}: {value}, ".encode() + content.lstrip()[1:]


def with_depth(value: Any, draw: random.Random, deepest: int = 960) -> Any:
    """One place of a JSON value nested as deeply as readers of JSON still take, or as ``deepest``
    levels.
    """
    made: Any = copy.deepcopy(value)
    place, kind = made, draw.randrange(2)
    while isinstance(place, dict | list) and place:
        key: Any = draw.choice(list(place)) if isinstance(place, dict) else 0
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.7:
            place = place[key]
            continue
        deep: Any = place[key]
        for _ in range(min(deepest, draw.choice([50, 200, 320, 480, 700, 900, 960]))):
            deep = {"a": deep} if kind else [deep]
        place[key] = deep
        break
    return made


def mutated_object(content: bytes, draw: random.Random) -> bytes:
    """``mutated_json_text``, a key that is there twice, a value that is nested deeply, or a number
    that few can compute with.
    """
    kind = draw.random()
    if kind < 0.1:
        return _twice(content, draw)
    if kind < 0.15:
        return json.dumps(with_depth(json.loads(content), draw)).encode()
    if kind < 0.3:
        number = draw.choice(["NaN", "1e308", "-1e308", "1e400", "-Infinity", "-1", "1" + "0" * 30])
        places = [at for at, one in enumerate(content) if one in b"0123456789"]
        at = draw.choice(places) if places else 0
        end = at
        while end < len(content) and content[end] in b"0123456789.eE-+":
            end += 1
        return content[:at] + number.encode() + content[end:]
    return mutated_json_text(content, draw)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _other(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _recode(path: Path) -> None:
    path.write_bytes(path.read_bytes().decode("latin-1").encode("utf-16"))


REPLACED: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: _other(path, os.mkfifo),
    "a directory": lambda path: _other(path, Path.mkdir),
    "a socket": lambda path: _other(path, _socket),
    "a link to a device": lambda path: _other(path, lambda one: one.symlink_to("/dev/zero")),
    "a link to itself": lambda path: _other(path, lambda one: one.symlink_to(one.name)),
    "a link to nothing": lambda path: _other(path, lambda one: one.symlink_to("nothing")),
    "a link to a directory": lambda path: _other(path, lambda one: one.symlink_to("/etc")),
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "1 TiB of zeros": lambda path: _other(path, _sparse),
    "1 TiB longer": lambda path: os.truncate(path, 1 << 40),
    "cut in two": lambda path: os.truncate(path, path.stat().st_size // 2),
    "in UTF-16": _recode,
    "a list around it": lambda path: path.write_bytes(b"[" + path.read_bytes() + b"]"),
    "null": lambda path: path.write_bytes(b"null"),
}  # fmt: skip
"""What may stand in the place of a file."""
