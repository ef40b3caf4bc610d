"""The process between the trainer and one that grades.  It runs no code of a reward, and so can do
what the grader cannot be trusted with:

    it reads what the grader and its children print, and keeps the end of it for a message
    it says how the grader ended, and ends what the grader has left behind
    it ends them all when the trainer is gone, however it went

It is the leader of the grader's process group, and the new parent of processes of the grader that
lose theirs, in whatever session they are.
"""

import ctypes
import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NoReturn

from isobit.rewards.wire import line, write_all

TAIL = 1500
"""Bytes of the output that are kept."""
_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_GLANCE_S = 1.0
"""How often it looks whether the trainer is still its parent, beside waiting for the pipe's end."""
_END_S = 2.0
"""How long it tries to end processes that go on making new ones."""


def adopt_orphans() -> None:
    """Become the parent of all processes below this one that lose theirs."""
    _process_control(_SET_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` ends, which started it."""
    _process_control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def keep(child: int, trainer: int, requests: int, replies: int, output: int) -> NoReturn:
    """Wait until the grader ``child`` or the ``trainer`` is gone, then end everything; does not
    return.

    ``requests`` is the pipe from the trainer (read by the grader; here its end is waited for),
    ``replies`` the one to it, ``output`` what the grader and its children print.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(requests, 0)  # the end alone, which is always told
    poller.register(output, select.POLLIN)
    poller.register(wake, select.POLLIN)
    tail, status = b"", None
    while status is None and os.getppid() == trainer:
        events = dict(poller.poll(_GLANCE_S * 1000))
        if requests in events:
            break
        if wake in events:
            os.read(wake, 4096)
        if output in events:
            printed = _read_some(output)
            tail = (tail + printed)[-TAIL:]
            if not printed:  # the grader has closed it
                poller.unregister(output)
        status = _reap(child)
    if status is not None:
        while _is_readable(output) and (chunk := _read_some(output)):
            tail = (tail + chunk)[-TAIL:]
        _tell(replies, os.waitstatus_to_exitcode(status), tail)
    _end_all()
    os._exit(0)


def _tell(replies: int, exit_code: int, tail: bytes) -> None:
    text = tail.decode("utf-8", "replace")
    try:
        write_all(replies, b"\n" + line({"ended": exit_code, "output": text}, text="output"))
    except OSError:  # the trainer is gone, too
        return


def _read_some(descriptor: int) -> bytes:
    return os.read(descriptor, 1 << 16)


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN for _, event in poller.poll(0))


def _reap(child: int) -> int | None:
    """Bury the dead; the wait status of ``child`` if it is among them."""
    status = None
    try:
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                status = found
            if pid == 0:
                return status
    except ChildProcessError:
        return status


def _end_all() -> None:
    """Kill everything below this process, again until nothing is left: a process may have made
    others before it was its turn.
    """
    until = monotonic() + _END_S
    while (found := list(_descendants(os.getpid()))) and monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):  # gone meanwhile
                os.kill(pid, signal.SIGKILL)
        _reap(0)
    os.killpg(0, signal.SIGKILL)


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # gone meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(pid)
    found = children.get(root, [])
    while found:
        yield from found
        found = [below for pid in found for below in children.get(pid, ())]


def _process_control(option: int, value: int) -> None:
    """prctl of Linux; elsewhere the process group alone holds the processes together."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(option, value, 0, 0, 0)
