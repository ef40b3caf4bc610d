"""New namespaces for the process that runs a model's code, as ``unshare`` of util-linux makes them,
with an identity that ``unshare`` cannot give.

    starter      waits for the first process, and ends as that ends
      helper     maps the identities from outside the namespaces, then ends
      first      process 1 of the namespaces, which continues and is killed with the starter

Inside, user and group 0 are those of the starter, which build the root. Root of the host then
becomes user 1, which is an id of the host that no account has: the kernel holds every user but the
host's root to the limit of processes (``kernel.are_threads_bounded``). The id is drawn for each
program, since kernels before 5.14 count the processes of a user in all namespaces together.
"""

import errno
import os
import resource
import secrets
import select
import signal
from typing import NoReturn

from . import kernel

ALL = 0x7E020000
"""Users, mounts, processes, network, IPC, host name and control groups."""
INSIDE = 1
"""The user and the group that a program of the host's root runs as."""
UNUSED, HOW_MANY = 0x7000_0000, 1 << 27
"""Identities that neither accounts nor containers are given (systemd's table of UIDs)."""


def enter(as_nobody: bool) -> int:
    """Make the namespaces; only the first process in them returns, with a descriptor for
    ``stay_bound``. ``as_nobody`` maps ``INSIDE`` too, which takes the rights of root. Raises
    OSError.
    """
    identity = UNUSED + secrets.randbelow(HOW_MANY) if as_nobody else None
    readable, writable = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(writable)
        os._exit(_mapped_from_outside(readable, os.getppid(), identity))
    os.close(readable)
    kernel.unshare(ALL)
    os.write(writable, b".")
    os.close(writable)
    failed = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if failed:
        raise OSError(failed, f"the map of users: {os.strerror(failed)}")
    ended, held = os.pipe()
    first = os.fork()
    if first:
        os.close(ended)
        _end_as(first)
    os.close(held)
    kernel.die_with_parent()
    return ended


def stay_bound(ended: int) -> None:
    """Die with the starter, which a process forgets when it changes its user; ``ended`` tells
    whether the starter died meanwhile. Call this after the last change.
    """
    kernel.die_with_parent()
    poller = select.poll()
    poller.register(ended, 0)
    if poller.poll(0):
        os._exit(1)
    os.close(ended)


def _mapped_from_outside(readable: int, starter: int, identity: int | None) -> int:
    """Write the maps once the starter has its namespaces; returns the number of the error, or 0."""
    if not os.read(readable, 1):
        return errno.ECANCELED
    try:
        if identity is None:
            _write(starter, "setgroups", "deny")
        for kind, own in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
            more = "" if identity is None else f"\n{INSIDE} {identity} 1"
            _write(starter, kind, f"0 {own} 1{more}\n")
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _write(process: int, name: str, content: str) -> None:
    descriptor = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
    try:
        os.write(descriptor, content.encode("ascii"))
    finally:
        os.close(descriptor)


def _end_as(first: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
