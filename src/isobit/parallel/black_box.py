"""What a rank was doing and why it ended, where its launcher finds it after its death: a page of
memory that both have, with one JSON object.

    phase      the part of the run that it was in
    error      why it stops, in the words of an error that a user can meet
    fault      the same of a fault in Isobit, whose traceback it prints
    lost       how it lost the connection to another
    code       the exit code that goes with it
    at         seconds of the host's monotonic clock, when one of them came up
    verdict    [rank, text]: it found that other one dead or silent

A rank that is killed leaves the page as it was.  Nothing here waits: a launcher that has stopped
stops nobody.
"""

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

VARIABLE = "ISOBIT_LAUNCHER"
"""``pid:descriptor``: of the launcher, and of the page as the rank has inherited it."""

_SIZE = 1 << 15
_LONGEST = 4000
"""Characters of a text, each at most six bytes of JSON."""


class BlackBox:
    """The page of one rank, seen from either side."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._entries: dict[str, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def made(cls) -> "BlackBox":
        """A new one, by the launcher."""
        return cls(os.memfd_create("isobit-rank"))

    def write(self, **entries: Any) -> None:
        """Add to what is known, or replace it."""
        with self._lock:
            for name, value in entries.items():
                self._entries[name] = value[:_LONGEST] if isinstance(value, str) else value
            os.pwrite(self.descriptor, json.dumps(self._entries).encode().ljust(_SIZE, b"\0"), 0)

    def read(self) -> Mapping[str, Any]:
        """What the rank has written last; nothing where it was killed within it."""
        try:
            return json.loads(os.pread(self.descriptor, _SIZE, 0).rstrip(b"\0") or b"{}")
        except ValueError:
            return {}

    def close(self) -> None:
        """Give the page back."""
        os.close(self.descriptor)
