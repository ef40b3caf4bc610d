"""The one way in which files that others may have written are opened and read.

A path may lead to a named pipe, which nobody ever writes to, or to a device without an end: opening
the one and reading the other would last for ever, in a server with a lock held.  So what is no
plain file is refused before it is opened, and what is read whole has a largest size.
"""

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

LARGEST_DESCRIPTION = 1 << 26
"""Bytes of a file that describes something, such as ``config.json`` or an index of shards."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: Path, follow_links: bool = True) -> BufferedReader:
    """A plain file for reading.  Raises OSError, whose ``strerror`` says what is there instead, and
    without ``follow_links`` also for a link.
    """
    _check(os.stat(path, follow_symlinks=follow_links), path)
    # what has become a pipe since then is opened without waiting for its writer
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _check(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def read_plain(path: Path, largest: int | None = LARGEST_DESCRIPTION) -> bytes:
    """The bytes of a plain file, of any size if ``largest`` is None.  Raises OSError as
    ``open_plain`` does, and for a file of more bytes.
    """
    with open_plain(path) as file:
        content = file.read() if largest is None else file.read(largest + 1)
    if largest is not None and len(content) > largest:
        raise OSError(errno.EFBIG, f"has more than {largest:,} bytes", str(path))
    return content


def check_plain(path: Path, largest: int | None = None) -> None:
    """Raise OSError where ``path``, which a library is about to open, is no plain file, or one of
    more bytes.
    """
    about = os.stat(path)
    _check(about, path)
    if largest is not None and about.st_size > largest:
        raise OSError(errno.EFBIG, f"has more than {largest:,} bytes", str(path))


def _check(about: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(about.st_mode):
        return
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((kind for is_it, kind in _KINDS if is_it(about.st_mode)), "a link")
    raise OSError(errno.EINVAL, f"is {kind}, not a file", str(path))
