"""Output that survives a missing reader: a closed pipe or terminal, a full disk, characters that
the encoding lacks. Also sizes as text.
"""

import errno
import io
import os
import select
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN}
"""Errors after which writing may work again, as when space has been freed."""


def help_width() -> int:
    """Columns of a line of help, as argparse has them."""
    return max(40, shutil.get_terminal_size().columns - 2)


class Standard:
    """The current ``sys.stdout`` or ``sys.stderr``, for ``rich.console.Console(file=..)``. Writing
    never raises: what cannot be written is dropped, and the first time is reported on stderr.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._has_told = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with self._forgiven():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(
                    text.encode(self.encoding, "backslashreplace").decode(self.encoding)
                )
        return len(text)

    def flush(self) -> None:
        with self._forgiven():
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Raises OSError where the stream has none."""
        return self._stream.fileno()

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        stream = getattr(stream, "rich_proxied_file", stream)  # rich's proxy while it shows a bar
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
    with suppress(OSError, ValueError):
        print(text, file=getattr(sys, name), flush=True)


@cache
def say_once(text: str) -> None:
    """``say`` a line once in a process."""
    say(text)


def hand_on(said: bytes) -> None:
    """Write what another process has printed to standard output, if it can be written."""
    with suppress(OSError, ValueError):
        sys.stdout.buffer.write(said)
        sys.stdout.flush()


def tell(text: str) -> None:
    """``say`` for a signal handler, which may interrupt any print: writes past the buffers, and
    only if this does not block.
    """
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{text}\n".encode())


def prepare() -> None:
    """Open /dev/null for standard streams that the caller closed, so that no other file gets their
    numbers, and escape characters that the encoding of the others lacks.
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
    """Flush the standard streams; returns the error if standard output could not be written."""
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
    """Send the stream's buffer and all later output to /dev/null."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


GIB = 1 << 30


def counted(number: float, nouns: str, one: str = "") -> str:
    """A number with what is counted: ``2,000 problems``, or ``1 problem`` (``one``, where that is
    not ``nouns`` without its last letter).
    """
    return f"{number:,} {(one or nouns[:-1]) if number == 1 else nouns}"


def gib(size: float) -> str:
    """A size as text: ``1.23 GiB``, ``45.6 MiB`` or ``789 KiB``."""
    unit, name = next(
        ((unit, name) for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")) if size >= unit),
        (1024, "KiB"),
    )
    number = size / unit
    return f"{number:.3g} {name}" if number < 999.5 else f"{number:,.0f} {name}"
