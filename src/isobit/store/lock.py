"""One process at a time in a run's directory: an advisory lock of the kernel on ``.lock``, which
ends with the process, however it ends.

The file names the holder for the message to the other one; it stays, empty of meaning, when nobody
holds the lock.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobit.errors import ConfigError
from isobit.store.directory import LOCK_FILE


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory.  Raises ConfigError naming the process, and its machine, that holds it
    already.
    """
    with (directory / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory} is in use by {_holder(directory / LOCK_FILE)}; "
                "wait for it or stop it, or name another directory (--output PATH)"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        yield


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
