"""Standard output and standard error of a program that goes on without them: a reader that has
gone (``| head``), a terminal that was closed, a log on a full disk, a character that the encoding
does not have.

    Standard      a stream for ``rich.console.Console(file=..)``: writing to it never raises
    say, tell     a line on standard error, as far as it can be written; ``tell`` in a signal
                  handler too
    prepare       at the beginning of a program: what a stream cannot encode is escaped
    settle        at its end: what is left in the buffers, so that the interpreter has nothing to
                  complain of when it closes them

Wall seconds of the parts of a step, by a monotonic clock.

Bytes for a reader.
"""

import errno
import io
import os
import select
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter
from typing import Any, Literal

Timing = Callable[[str], AbstractContextManager[None]]
"""Told which part of the work a block is; a ``Clock`` is one."""


def untimed(_: str) -> AbstractContextManager[None]:
    """The timing of those whom it does not interest."""
    return nullcontext()


class Clock:
    """Adds up the seconds spent under each name; ``on_enter`` is told when one begins."""

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._on_enter = on_enter

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under ``name``."""
        started_at = perf_counter()
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - started_at

    def add(self, name: str, seconds: float) -> None:
        """Count what another process has spent."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """The seconds by name since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN}
"""Of a full disk, for example, whose user may make room."""


class Standard:
    """``sys.stdout`` or ``sys.stderr``, whichever that is when something is written.  What cannot
    be written is left out; the first time that is said on standard error.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._has_told = False

    @property
    def encoding(self) -> str:
        """Of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written."""
        with self._forgiven():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(_escaped(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        """Hand on what is in the buffer."""
        with self._forgiven():
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether a terminal is there."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Of the stream.  Raises OSError where it has none."""
        return self._stream.fileno()

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        # rich puts itself in the place of the stream while it shows a bar
        stream = getattr(stream, "rich_proxied_file", stream)
        return io.StringIO() if stream is None else stream

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it was closed
            if getattr(error, "errno", None) not in _MAY_PASS:
                _to_nowhere(self._stream)
            if not self._has_told:
                self._has_told = True
                name = "standard output" if self._name == "stdout" else "standard error"
                reason = getattr(error, "strerror", None) or error
                say(f"{name} cannot be written ({reason}): the work goes on without it")


def say(text: str, name: Literal["stdout", "stderr"] = "stderr") -> None:
    """A line on a standard stream, if it can be written."""
    with suppress(OSError, ValueError):
        print(text, file=getattr(sys, name), flush=True)


def hand_on(said: bytes) -> None:
    """To standard output what another process has printed, if it can be written."""
    with suppress(OSError, ValueError):
        sys.stdout.buffer.write(said)
        sys.stdout.flush()


def tell(text: str) -> None:
    """The same from a signal handler, which may run in the middle of any print: past the buffers,
    and without waiting for a reader who does not read.
    """
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{text}\n".encode())


def prepare() -> None:
    """Have standard streams that were closed by the caller lead nowhere, before another file gets
    their numbers, and have the others escape what they cannot encode.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def settle() -> OSError | None:
    """Write what is left in the buffers; -> why standard output could not be written, if so."""
    lost: OSError | None = None
    for stream in (sys.stderr, sys.stdout):
        lost = None
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            lost = error
            _to_nowhere(stream)
        except ValueError:  # it was closed
            pass
    return lost


def _to_nowhere(stream: Any) -> None:
    """What is in the stream's buffer, and what comes, goes to /dev/null."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _escaped(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


GIB = 1 << 30


def gib(size: float) -> str:
    """``1.23 GiB``, ``45.6 MiB`` or ``789 KiB``."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return (
                f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
            )
    return f"{size / 1024:.3g} KiB"
