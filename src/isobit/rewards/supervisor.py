"""A process that runs code of a reward or a tool, and the supervisor that it is forked from.

``supervised`` forks before anything is loaded: the child serves, the parent (``keep``) supervises
it. The child has

    limits       on its memory (``limit_memory``); no core files
    its output   in a pipe of its own, so that its prints do not reach standard output
    no signals   signals to all processes of the run, as Slurm and systemd send them, are left to
                 the trainer

The supervisor runs no code of a user. It keeps the end of the child's output for error messages,
reports how the child ended, and kills all processes that it started, also when the trainer has
ended. For that it leads the child's process group and adopts its orphans, in any session.

The limit counts private memory that can be written: heap, arrays, stacks (RLIMIT_DATA of Linux,
``VmData`` in ``/proc/PID/status``). It does not count libraries' code, mapped files, shared memory,
or reserved address space, of which a CUDA build of torch maps many GiB.
"""

import ctypes
import mmap
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

from isobit.rewards.messages import line, write_all

TAIL = 1500
"""Bytes of the output that are kept."""
_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_GLANCE_S = 1.0
"""Seconds between checks whether the trainer is still its parent."""
_END_S = 2.0
"""Seconds for killing processes that keep starting new ones."""


def adopt_orphans() -> None:
    _process_control(_SET_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its ``parent`` ends."""
    _process_control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def keep(child: int, trainer: int, requests: int, replies: int, output: int) -> NoReturn:
    """Wait until the grader ``child`` or the ``trainer`` has ended, then end everything; does not
    return.

    ``requests`` is the pipe from the trainer to the grader, watched for its end, ``replies`` the
    one to the trainer, ``output`` the output of the grader and its children.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(requests, 0)  # its end is always reported
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
    except OSError:  # the trainer has ended too
        return


def _read_some(descriptor: int) -> bytes:
    return os.read(descriptor, 1 << 16)


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN for _, event in poller.poll(0))


def _reap(child: int) -> int | None:
    """Reap ended children; the wait status of ``child`` if it is among them."""
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
    """Kill everything below this process, repeatedly, since processes may start others."""
    until = monotonic() + _END_S
    while (found := list(descendants(os.getpid()))) and monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        _reap(0)
    os.killpg(0, signal.SIGKILL)


def descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(pid)
    found = children.get(root, [])
    while found:
        yield from found
        found = [below for pid in found for below in children.get(pid, ())]


def _process_control(option: int, value: int) -> None:
    """prctl of Linux; elsewhere only the process group holds the processes together."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(option, value, 0, 0, 0)


def limit_memory(size: int) -> None:
    """Limit the private memory of this process and its children to ``size`` bytes, or the address
    space on a kernel that does not enforce that.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if not _is_held_to(size):
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _is_held_to(size: int) -> bool:
    """Whether memory beyond ``size`` bytes is refused; none of it is touched."""
    try:
        mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


FOR_THE_TRAINER = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)


def supervised(serve: Callable[[int, int], None]) -> None:
    """Call ``serve`` with the descriptors of requests and replies, in a process that is supervised
    as above.
    """
    trainer = os.getppid()
    requests, replies = os.dup(0), os.dup(1)
    output, printed = os.pipe()
    adopt_orphans()
    keeper = os.getpid()
    leave_to_trainer()
    os.register_at_fork(after_in_child=_end_by_them)
    grader = os.fork()
    if grader:
        os.close(printed)
        keep(grader, trainer, requests, replies, output)
    die_with_parent(keeper)
    leave_to_trainer()
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(printed)
    serve(requests, replies)


def leave_to_trainer() -> None:
    """Do nothing on signals to the run. Ignoring them would be inherited by programs."""
    for number in FOR_THE_TRAINER:
        signal.signal(number, _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _end_by_them() -> None:
    """Restore the default handlers after a fork, except for signals that the reward handles."""
    for number in FOR_THE_TRAINER:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)
