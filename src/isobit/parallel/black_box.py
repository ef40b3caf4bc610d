"""What a process tells its launcher: ``BlackBox``, a page of memory that both share, from which our
launcher reads why a rank has ended.  Needs no torch.

    phase      the part of the run that it was in
    error      why it stops, as a user's error
    fault      the same of a fault in Isobit, whose traceback it prints
    lost       how it lost the connection to another rank
    code       the exit code that goes with it
    at         seconds of the host's monotonic clock, when one of them was written
    verdict    [rank, text]: it found another rank dead or silent
    silent     [rank, start]: of rollouters that start again, one on another host that it found so
"""

import ctypes
import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

VARIABLE = "ISOBIT_LAUNCHER"
"""``pid:descriptor``: of the launcher, and of the page as the rank inherits it."""
_SIZE = 1 << 15
_LONGEST = 4000  # characters of a text, of at most six bytes of JSON each


class BlackBox:
    """The page of one rank, used by the launcher and the rank."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._entries: dict[str, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def made(cls) -> "BlackBox":
        """A new page, made by the launcher."""
        return cls(os.memfd_create("isobit-rank"))

    def write(self, **entries: Any) -> None:
        """Add or replace entries."""
        with self._lock:
            for name, value in entries.items():
                self._entries[name] = value[:_LONGEST] if isinstance(value, str) else value
            os.pwrite(self.descriptor, json.dumps(self._entries).encode().ljust(_SIZE, b"\0"), 0)

    def read(self) -> Mapping[str, Any]:
        """What the rank wrote last; nothing where it was killed while writing."""
        try:
            return json.loads(os.pread(self.descriptor, _SIZE, 0).rstrip(b"\0") or b"{}")
        except ValueError:
            return {}

    def close(self) -> None:
        os.close(self.descriptor)


_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> BlackBox | None:
    """Let the kernel end this process with our launcher; -> its black box, None without one."""
    numbers = os.environ.get(VARIABLE)
    if numbers is None:
        return None
    launcher, descriptor = (int(number) for number in numbers.split(":"))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it has ended before the line above
        os._exit(128 + signal.SIGKILL)
    # A terminal may stop background processes that write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    del os.environ[VARIABLE]  # what this process starts is no rank
    return BlackBox(descriptor)
