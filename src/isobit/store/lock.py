"""The lock of a run's directory, which one process at a time holds."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain, read_plain
from isobit.util.strict_json import json_text

LOCK_FILE = ".lock"
_held: set[int] = set()  # descriptors of this process's locks


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory by an advisory lock of the kernel on ``.lock``, which ends with the
    process. Raises ConfigError naming the process and the machine that holds it, which the file
    names too.
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
        file.write(json_text({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        _held.add(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a process of this machine writes into a run's directory."""
    try:
        with open_plain(directory / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _let_go() -> None:
    """A forked child (of a reward, say) gives up its copy of the descriptor, so that it does not
    hold the directory once the run has ended.  The number stays taken until it is closed.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_plain(path))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
