"""What grading one completion came to: a finite number, or a failure with its kind.

A reward's own answer may be a number of Python, numpy or torch, or, as verl's functions give it, a
dict whose ``score`` is the number; its other entries are dropped.

Counts of what graders met: answers out of bounds, code that ran too long, and so on.

A score says that an answer was wrong, a count says in which unusual way.  Graders call ``count``;
whoever runs them calls ``take`` after each grading and adds up what he gets.

A reward's own code may call ``count`` with what it likes: what leaves its process is bounded in
kinds, characters and numbers, and is bounded again where it arrives.

What passes between the trainer and a process that grades.

    to the grader     frames: 8 bytes of length, and a pickle, since rows hold whatever the dataset
                      does
    to the trainer    lines: a JSON object each, at most ``LINE_LIMIT`` bytes

Nothing that a grader sends is ever unpickled: it has run text that a model wrote.  A line is no
longer than what a pipe takes at once, so that two processes may write into the same one.

A deadline for a computation in this process, where one can be had.

An alarm of the operating system interrupts Python code, also code that survives any ``Exception``.
Python swallows what is raised while it collects garbage, in a destructor or in a callback; so the
alarm comes again until it is heard.
It exists in the main thread only, and it does not interrupt a library that never returns to Python:
the grading pool's own deadline, which ends the process, stands behind it.
"""

import json
import math
import os
import pickle
import signal
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from isobit.util.secrets import hidden

LARGEST = 1e18
"""A reward may be: sums of squares of such numbers are still numbers of FP32."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that is no usable number."""

    kind: str
    """The exception's name, ``not finite``, ``too large``, ``not a number``, ``no reward``,
    ``deadline`` or ``crash``.
    """
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", hidden(self.message))


Outcome: TypeAlias = float | Failure


def failure_of(error: BaseException) -> Failure:
    """What a reward raised, cut to a length that can be shown."""
    kind = type(error).__name__[:100]
    try:
        message = f"{kind}: {error}"
    except Exception as another:  # of the exception's own method
        message = f"{kind}, whose text raises {type(another).__name__:.100}"
    return Failure(kind, message[:2000])


def outcome_of(value: Any) -> Outcome:
    """What a reward returned for one completion: Python's and numpy's integers, floats and booleans
    are numbers, and so is a tensor of no dimension; anything else is a failure, and so is what
    raises when it is asked for its number.
    """
    try:
        return _number_or_failure(value)
    except Exception as error:  # a tensor without data, an object with methods of its own
        return failure_of(error)


def _number_or_failure(value: Any) -> Outcome:
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(repr, value)) or "nothing"
            return Failure(
                "not a number", f"the reward returned a dict with {keys:.200}, expected 'score'"
            )
        value = value["score"]
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        return Failure(
            "not a number",
            f"the reward returned {type(value).__name__} {value!r:.80}, expected a number",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Failure("not finite", f"the reward returned {number}, expected a finite number")
    if abs(number) > LARGEST:
        return Failure(
            "too large", f"the reward returned {number}, expected at most {LARGEST:g} in magnitude"
        )
    return number


MOST_KINDS = 32
"""Told apart; the rarest of more are added up as ``OTHER_KINDS``."""
LONGEST_KIND = 60
"""Characters."""
MOST = 10**9
OTHER_KINDS = "other kinds"

_COUNTS: Counter[str] = Counter()


def count(kind: str) -> None:
    """Note one ``kind``, as in ``"code: time limit"``: the grader's name, then what happened."""
    _COUNTS[kind] += 1


def take() -> dict[str, int]:
    """What was counted in this process since the last call, by kind, bounded."""
    taken = bounded(_COUNTS)
    _COUNTS.clear()
    return taken


def bounded(counts: Mapping[Any, Any]) -> dict[str, int]:
    """The counts from the most frequent kind on: at most ``MOST_KINDS`` of them, in at most
    ``LONGEST_KIND`` printable characters of ASCII that JSON need not escape, each at most ``MOST``.
    What is no count of a kind is left out.
    """
    found: Counter[str] = Counter()
    for kind, number in counts.items():
        if isinstance(kind, str) and type(number) is int and number > 0:
            found[_plain(kind)] += number
    others = found.pop(OTHER_KINDS, 0)
    ordered = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    kept = dict(ordered[: MOST_KINDS - 1])
    others += sum(number for _, number in ordered[MOST_KINDS - 1 :])
    if others:
        kept[OTHER_KINDS] = others
    return {kind: min(number, MOST) for kind, number in kept.items()}


def _plain(kind: str) -> str:
    return "".join(
        one if " " <= one <= "~" and one not in '"\\' else "?" for one in kind[:LONGEST_KIND]
    )


LINE_LIMIT = 4096
"""PIPE_BUF of Linux."""
_LENGTH = struct.Struct(">Q")


def frame(content: Any) -> bytes:
    """Raises whatever pickling raises."""
    payload = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


def read_frame(descriptor: int) -> Any:
    """The next frame, waiting for it.  Raises EOFError where the trainer is gone."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return pickle.loads(_read(descriptor, length))  # noqa: S301  the trainer's own


def line(content: dict[str, Any], text: str = "message") -> bytes:
    """A line; what stands under ``text`` is cut until it fits."""
    encoded = json.dumps(content, allow_nan=False).encode() + b"\n"
    while len(encoded) > LINE_LIMIT:
        content = {**content, text: content[text][: len(content[text]) * 3 // 4]}
        encoded = json.dumps(content, allow_nan=False).encode() + b"\n"
    return encoded


def read_line(encoded: bytes) -> dict[str, Any] | None:
    """The object of a line, or None for what is none."""
    try:
        content = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_all(descriptor: int, encoded: bytes) -> None:
    """Write to a blocking descriptor."""
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


AGAIN_S = 1.0
"""Longer than it takes to say what was swallowed."""


class DeadlineError(BaseException):
    """The time is over.  No ``Exception``, so that no library takes it for one of its own."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in what runs inside after ``seconds`` of wall-clock time.

    Outside the main thread nothing is bounded.  An alarm that was set before goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # an alarm that came on the way to the line above has skipped it
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    raise DeadlineError
