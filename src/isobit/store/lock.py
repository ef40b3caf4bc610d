"""One process at a time in a run's directory: an advisory lock of the kernel on ``.lock``, which
ends with the process, however it ends.

The file names the holder for the message to the other one; it stays, empty of meaning, when nobody
holds the lock.  A process that is forked from the holder (by a reward, say) gives its copy of the
descriptor up: it must not hold the directory once the run is dead.
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

_held: set[int] = set()
"""Descriptors of this process's locks."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory.  Raises ConfigError naming the process, and its machine, that holds it
    already.
    """
    descriptor = os.open(
        directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666
    )
    with open(descriptor, "a+", encoding="utf-8") as file:
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
        _held.add(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a process of this machine writes into a run's directory; changes nothing."""
    try:
        with open(directory / LOCK_FILE, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _let_go() -> None:
    """In a forked child the lock is the parent's; the number stays taken, for who closes it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
