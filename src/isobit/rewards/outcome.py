"""The outcome of grading one completion, a finite number or a failure with its kind; counts of
unusual answers; the messages of grading processes; and deadlines.

A reward may return a number of Python, numpy or torch, or, as in verl, a dict with the number as
``score``. None instead of the number says that the reward does not apply to the completion
(``NO_REWARD``): of several parts the others make its reward, and alone it is a failure.

A grader calls ``count`` for an answer that is wrong in an unusual way, such as code that ran too
long, and its caller calls ``take`` after each grading. A user's reward may count anything, so
counts are bounded in number, length and value before they are sent and again when they are
received.

Messages of a grading process:

    to the grader     frames: 8 bytes of length, and a pickle, since rows may hold anything
    to the trainer    lines: a JSON object each, at most ``LINE_LIMIT`` bytes

Nothing from a grader is unpickled, since it has run text that a model wrote. A pipe takes a line at
once, so that two processes may write to the same one.

``deadline`` is an alarm of the operating system, for the main thread only. It interrupts Python
code even if that catches every ``Exception``. Python swallows exceptions in destructors and
callbacks, so the alarm is repeated. It cannot interrupt a library that never returns to Python;
then the grading pool kills the process.
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

from isobit.util.errors import escaped, shown
from isobit.util.option_secrets import hidden

LARGEST = 1e18
"""The largest reward: sums of squares of such numbers are still finite in FP32."""


NO_REWARD = "no reward"
"""The kind of a reward that does not apply to a completion."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no number. Both texts may come from untrusted processes and are printed, so
    that unprintable characters are escaped.
    """

    kind: str
    """The exception's name, ``not finite``, ``too large``, ``not a number``, ``no reward``,
    ``deadline`` or ``crash``.
    """
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", shown(self.kind))
        object.__setattr__(self, "message", escaped(hidden(self.message)))


Outcome: TypeAlias = float | Failure


def failure_of(error: BaseException) -> Failure:
    """The failure of a reward that raised, with a shortened message."""
    kind = type(error).__name__[:100]
    try:
        message = f"{kind}: {error}"
    except Exception as another:  # raised by the exception's own method
        message = f"{kind}, whose text raises {type(another).__name__:.100}"
    return Failure(kind, message[:2000])


def outcome_of(value: Any) -> Outcome:
    """The outcome for a reward's return value: integers, floats, booleans and tensors of no
    dimension are numbers; anything else, or one that raises when it is converted, is a failure.
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
    if value is None:
        return Failure(NO_REWARD, "the reward returned None, so it does not apply")
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
"""Kinds that are distinguished; the rarest are added up as ``OTHER_KINDS``."""
LONGEST_KIND = 60
"""Characters."""
MOST = 10**9
OTHER_KINDS = "other kinds"

_COUNTS: Counter[str] = Counter()


def count(kind: str) -> None:
    """Count one ``kind``, as in ``"code: time limit"``: the grader's name, then what happened."""
    _COUNTS[kind] += 1


def take() -> dict[str, int]:
    """What was counted in this process since the last call, by kind, bounded."""
    taken = bounded(_COUNTS)
    _COUNTS.clear()
    return taken


def bounded(counts: Mapping[Any, Any]) -> dict[str, int]:
    """The ``MOST_KINDS`` most frequent kinds, in at most ``LONGEST_KIND`` printable ASCII
    characters that JSON need not escape, each counted at most ``MOST``. Invalid entries are left
    out.
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


def read_line(encoded: bytes) -> dict[str, Any] | None:
    """The object of a line, or None if it is invalid."""
    try:
        content = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


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


AGAIN_S = 1.0
"""Longer than it takes Python to report a swallowed exception."""


class DeadlineError(BaseException):
    """The time is over. Not an ``Exception``, so that libraries do not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in the block after ``seconds`` of wall-clock time, in the main thread
    only. An alarm that was set before continues afterwards.
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
    finally:  # an alarm just before the line above would skip it
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    raise DeadlineError
