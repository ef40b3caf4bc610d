"""A new root for the calling process, which `unshare` gave namespaces of its own.

    /            tmpfs, read-only at the end
    SHOWN        what the host shows, bound read-only at its own path or at another
    LINKS        symbolic links, as the host has them (/lib -> usr/lib)
    /dev         null and urandom
    /tmp         tmpfs of a bounded size, the only place to write

There is no /proc.  The host's root is unmounted before this returns.
"""

import os
from collections.abc import Mapping

from . import kernel

DEVICES = ("/dev/null", "/dev/urandom")
OLD = "/old-root"
FILES_IN_TMP = 1024


def build(shown: Mapping[str, str], links: Mapping[str, str], tmp_bytes: int) -> None:
    """Enter the new root: ``shown`` maps a path inside to the host's, ``links`` a path inside to
    what it points to.

    Raises OSError naming what could not be mounted.
    """
    plain = kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("tmpfs", "/tmp", "tmpfs", plain, "size=1m,mode=755")  # noqa: S108  (a place that every host has)
    os.mkdir("/tmp" + OLD)  # noqa: S108
    kernel.pivot("/tmp", "/tmp" + OLD)  # noqa: S108
    for inside, host in shown.items():
        _bind(OLD + host, inside)
        kernel.make_read_only(inside)
    for device in DEVICES:
        _bind(OLD + device, device)
    for inside, target in links.items():
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.symlink(target, inside)
    os.makedirs("/tmp", exist_ok=True)  # noqa: S108
    kernel.detach(OLD)
    os.rmdir(OLD)
    _make_root_read_only()
    bounds = f"size={tmp_bytes},nr_inodes={FILES_IN_TMP},mode=700"
    kernel.mount("tmpfs", "/tmp", "tmpfs", plain, bounds)  # noqa: S108
    os.chdir("/tmp")  # noqa: S108


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    kernel.mount(source, target, "", kernel.BIND | kernel.RECURSIVE)


def _make_root_read_only() -> None:
    remount = 32
    flags = kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("", "/", "", remount | kernel.BIND | flags)
