"""The lines of a file that another process is writing.

A file of lines is read on from where the last look ended, for a limited time, up to its last whole
line.  A file that was replaced or cut, as by a run that is resumed, is read anew.  Of a file that
is not there nothing is known.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from isobit.util.plain_files import open_plain
from isobit.util.strict_json import parsed_line

LOOK_S = 0.5
"""How long one look at a file may read."""
LONGEST_LINE = 64 << 20
"""Bytes; a longer line is left out."""
HEAD = 64
"""Bytes before the place of a look that must be as they were, or the file is read anew."""


class GrowingFile(ABC):
    """The whole lines of a file that grows."""

    def __init__(self, path: Path, follow_links: bool = False) -> None:
        self.path = path
        self._follow_links = follow_links
        self.version = 0
        """A number that changes with what is known of the file."""
        self.position, self.size, self.damaged = 0, 0, 0
        """Bytes that were read, bytes that are there, lines that cannot be read."""
        self._lines_read, self._rest = 0, b""
        """Whole lines that were read; the unfinished one behind them."""
        self._identity, self._last, self._in_long_line = (0, 0), b"", False
        self._clear()

    @property
    def is_read(self) -> bool:
        """Whether the last look left nothing; an unfinished line does not count."""
        return self.position >= self.size

    def read_whole(self, problems: list[str]) -> None:
        """Read to the end, once; what is missing or damaged becomes a sentence among the problems.
        A last line without its end counts where it is an object.
        """
        self.look(math.inf)
        damaged, lines = self.damaged, self._lines_read
        if self._rest:
            content = parsed_line(self._rest)
            damaged, lines = damaged + (content is None), lines + 1
            if content is not None:
                self._take(self.position, content)
        if not self.path.is_file():
            problems.append(f"{self.path.name} is missing: the page lacks what it holds")
        elif damaged:
            problems.append(
                f"{self.path.name}: {damaged} of {lines} lines cannot be read and are left out"
            )

    def look(self, seconds: float = LOOK_S) -> None:
        """Read on, for that long at most."""
        until = monotonic() + seconds
        try:
            with open_plain(self.path, self._follow_links) as file:
                self._find_place(file)
                for at, line in self._lines(file, until):
                    content = parsed_line(line)
                    self.damaged += content is None
                    if content is not None:
                        self._take(at, content)
                    self.version += 1
        except OSError:
            self._forget()

    def _find_place(self, file: BinaryIO) -> None:
        about = os.fstat(file.fileno())
        identity = about.st_dev, about.st_ino
        file.seek(self.position - len(self._last))
        if identity != self._identity or file.read(len(self._last)) != self._last:
            self._forget()
            file.seek(0)
        self._identity, self.size = identity, about.st_size

    def _forget(self) -> None:
        if self.position:
            self.version += 1
        self.position, self.size, self.damaged = 0, 0, 0
        self._lines_read, self._rest = 0, b""
        self._identity, self._last, self._in_long_line = (0, 0), b"", False
        self._clear()

    def _lines(self, file: BinaryIO, until: float) -> Iterator[tuple[int, bytes]]:
        while monotonic() < until:
            line = file.readline(LONGEST_LINE)
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < LONGEST_LINE:
                self.size, self._rest = self.position, line
                return
            at, self.position = self.position, self.position + len(line)
            self._last = line[-HEAD:]
            if is_whole and not self._in_long_line:
                yield at, line
            self.damaged += is_whole and self._in_long_line
            self._lines_read += is_whole
            self._in_long_line = not is_whole

    @abstractmethod
    def _take(self, at: int, content: dict[str, Any]) -> None:
        """Keep what is needed of the object in the line at byte ``at``."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget every line."""


class GrowingLines(GrowingFile):
    """The objects of a file's lines, all in memory."""

    def _take(self, at: int, content: dict[str, Any]) -> None:
        self.objects.append(content)

    def _clear(self) -> None:
        self.objects: list[dict[str, Any]] = []
