"""A sandbox for code that a model wrote: processes that see a bare, read-only system.

Two tools make it, whichever works first: bubblewrap (``bwrap``), or util-linux's ``unshare`` with a
root of our own (`confined.root`).  Both give namespaces for users, mounts, processes, network, IPC
and host name; inside, `confined.limits` and `confined.calls` add bounds and a filter of calls.

    seen       Python and its library, the system's libraries, all read-only
    written    /tmp of 16 MiB, gone with the process
    not there  the network, other processes, /proc, files and environment of the host, new processes
    bounded    wall-clock time, CPU time, memory, size of files, descriptors, output
    ended      as a whole, with whoever started it too

Where neither tool works, `launcher` raises ``RewardError`` and says why.  What it cannot hold: a
fault of the kernel itself; how long things take; and up to 64 MiB of kernel buffers and the 16 MiB
of /tmp beside the memory limit.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isobit.errors import RewardError
from isobit.rewards.sandboxed_process import (
    CONFINED,
    INSIDE,
    Launcher,
    Limits,
    OutputLimitError,
    Process,
    SandboxError,
    TimeLimitError,
    interpreter,
)

TMP_BYTES = 16 << 20
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
DEVICES = ("/dev/null", "/dev/urandom")
KILLER = "setpriv --pdeathsig KILL --"


def shown() -> dict[str, str]:
    """What the sandbox sees read-only: path inside to the host's path."""
    prefix = Path(sys.base_prefix)
    python = Path(interpreter())
    paths = [
        Path(path) for path in LIBRARIES if Path(path).is_dir() and not Path(path).is_symlink()
    ]
    if prefix == Path("/usr"):
        paths.append(python)
    else:
        paths += [prefix / "lib", prefix / "bin"]
        if not python.is_relative_to(prefix / "bin"):
            paths.append(python)
    if Path("/etc/ld.so.cache").is_file():
        paths.append(Path("/etc/ld.so.cache"))
    return {**{str(path): str(path) for path in paths}, INSIDE: str(CONFINED)}


def links() -> dict[str, str]:
    """Symbolic links of the host that the libraries are found by."""
    return {path: os.readlink(path) for path in LIBRARIES if os.path.islink(path)}


class Bubblewrap(Launcher):
    """``bwrap`` makes namespaces and root, and ends with its parent."""

    name = "bubblewrap"
    needs = ("bwrap",)

    def command(self, python: Sequence[str]) -> list[str]:
        """``python`` inside."""
        words = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        words += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"]
        for inside, host in shown().items():
            words += ["--ro-bind", host, inside]
        for inside, target in links().items():
            words += ["--symlink", target, inside]
        for device in DEVICES:
            words += ["--dev-bind", device, device]
        words += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/"]  # noqa: S108
        return [*words, "--chdir", "/tmp", "--cap-drop", "ALL", "--", *python]  # noqa: S108


class Unshare(Launcher):
    """``unshare`` makes namespaces, `confined.root` the root."""

    name = "unshare"
    needs = ("unshare", "setpriv")
    privileged = True

    def command(self, python: Sequence[str]) -> list[str]:
        """``python`` inside namespaces of its own, still before the host's files."""
        words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
        words += ["--kill-child", "--net", "--ipc", "--uts", "--cgroup", "--"]
        return [*KILLER.split(), *words, *python]

    def root(self) -> dict[str, Any]:
        """All of it, for `confined.root.build`."""
        return {"shown": shown(), "links": links(), "tmp_bytes": TMP_BYTES}


class Unsandboxed(Launcher):
    """No namespaces: bounds and the filter of system calls alone.  The code reads what you can
    read.
    """

    name = "no sandbox"

    def command(self, python: Sequence[str]) -> list[str]:
        """``python`` as it stands; it ends with its parent where ``setpriv`` is there."""
        return [*(KILLER.split() if shutil.which("setpriv") else ()), *python]


@cache
def launcher(unsandboxed: bool) -> Launcher:
    """The first launcher that works here, tried once a process.

    Raises ``RewardError`` with what was wrong with each where none does, unless ``unsandboxed``.
    """
    reasons = []
    for candidate in (Bubblewrap(), Unshare()):
        reason = trial(candidate)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    if unsandboxed:
        return Unsandboxed()
    raise RewardError(
        "code that a model wrote is run in a sandbox only, and none works here ("
        + "; ".join(reasons)
        + "); install bubblewrap, or allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone or user.max_user_namespaces; in a container, its seccomp "
        "profile), or give the grader "
        "unsandboxed = true, with which the code may read and send whatever you may"
    )


def trial(candidate: Launcher) -> str | None:
    """Why ``candidate`` does not work here; None if it does."""
    for program in candidate.needs:
        if shutil.which(program) is None:
            return f"there is no {program}"
    try:
        Process("probe", {}, Limits(10.0, 256 << 20), candidate).finish(1000)
    except (SandboxError, TimeLimitError, OutputLimitError, OSError) as error:
        return str(error)
    return None
