"""A sandbox for code that a model wrote: processes in a bare, read-only system.

It is made by bubblewrap (``bwrap``) or by our own code (`sandboxed.namespaces`,
`sandboxed.kernel.build_root`). Both give namespaces for users, mounts, processes, network, IPC and
host name; inside, `sandboxed.kernel` adds limits and a filter of system calls.

    visible    Python and its library, the system's libraries, all read-only
    writable   /tmp of 16 MiB, which is lost with the process
    absent     the network, other processes, /proc, the host's files and environment, new processes
    limited    wall-clock time, CPU time, memory, threads, size of files, descriptors, output
    ended      all processes together, also when their starter ends

The kernel limits the threads of every user but the host's root. So root's programs run as a user of
their own where that is possible, and where it is not, threads are refused altogether; each program
decides that for itself, and ``Launcher.describe`` says what a run can expect.

If neither way works, `launcher` raises ``RewardError`` and says why. The sandbox does not protect
against faults of the kernel or timing. SECURITY.md says what comes on top of the memory limit.

The job and the input of a process are files in memory; its output is a pipe, read up to a size and
a deadline.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from select import select
from typing import Any, Literal

from isobit.util.errors import RewardError

Role = Literal["candidate", "tests", "script", "probe"]
FILE_BYTES = 16 << 20
SANDBOXED_CODE = Path(__file__).parent / "sandboxed"
INSIDE = "/isobit/sandboxed"
"""The path of `isobit.rewards.sandboxed` inside the sandbox."""
TIDY_SECONDS = 5.0
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    # libraries would start a thread for each core, and the C library reserve 64 MiB for each thread
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "1",
}


class TimeLimitError(Exception):
    """Code that did not end in time; all of it has been killed."""


class SandboxError(Exception):
    """A sandbox that could not be made this time; the code has not run."""


class OutputLimitError(Exception):
    """Code that wrote too much; all of it has been killed."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    seconds: float
    memory_bytes: int


class Launcher(ABC):
    name: str
    needs: tuple[str, ...] = ()
    """Programs that must be installed."""
    as_nobody: bool = False
    """Whether programs run as a user of their own, for which one must be root."""
    dies_by_itself: bool = False
    """Whether ``command`` ends its process with the starter; otherwise `sandboxed.main` does."""
    threads: int | None = None
    """Threads that a program may have, the first included; known after a ``trial``."""

    @abstractmethod
    def command(self, python: Sequence[str]) -> list[str]:
        """The command that runs the command ``python`` in the sandbox."""

    def root(self) -> dict[str, Any] | None:
        """The arguments of `sandboxed.kernel.build_root`; None if ``command`` makes the root."""
        return None

    def describe(self) -> str:
        """A line on what confines a program, for the start of a run."""
        threads = self.threads or 1
        return f"sandbox: {self.name}, " + (
            f"at most {threads} threads each"
            if threads > 1
            else "no threads, as nothing here limits how many root may have"
        )


def interpreter() -> str:
    """The real interpreter, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class Process:
    """One process in the sandbox, and all that it starts.

    ``job`` is what its role needs (`sandboxed.main`); ``pass_fds`` are descriptors that it keeps;
    ``stdin`` its input.
    """

    def __init__(
        self,
        role: Role,
        job: dict[str, Any],
        limits: ProcessLimits,
        launched_by: Launcher,
        *,
        stdin: bytes = b"",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.deadline = time.monotonic() + limits.seconds
        self.started = False
        """Whether the code was reached; known once the process has ended."""
        bounds = {
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": int(limits.seconds) + 1,
            "file_bytes": FILE_BYTES,
        }
        described = {
            **job,
            "role": role,
            "limits": bounds,
            "parent": None if launched_by.dies_by_itself else os.getpid(),
            "root": launched_by.root(),
            "as_nobody": launched_by.as_nobody,
        }
        self._job = _file(json.dumps(described).encode("ascii"))
        self._errors = _file(b"")
        boot = "import sys; sys.path[:0] = sys.argv[2:]; from sandboxed.main import main; main()"
        python = [interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", boot, str(self._job)]
        python += [os.path.dirname(INSIDE), str(SANDBOXED_CODE.parent)]
        given = _file(stdin)
        try:
            self._process = subprocess.Popen(  # noqa: S603  (words, no shell)
                launched_by.command(python),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(self._job, *pass_fds),
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(given)

    @property
    def seconds_left(self) -> float:
        """Wall-clock time until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def finish(self, most_bytes: int) -> tuple[bytes, int]:
        """All output and the exit code. All of its processes have ended when this returns or
        raises.

        Raises TimeLimitError, OutputLimitError, and SandboxError if the code never ran.
        """
        try:
            output, exit_code = self._read(most_bytes), self._process.wait(self.seconds_left)
            if os.fstat(self._job).st_size > 0:
                lines = os.pread(self._errors, 10_000, 0).decode("utf-8", "replace").splitlines()
                raise SandboxError(lines[-1][:300] if lines else f"exit code {exit_code}")
            return output, exit_code
        except subprocess.TimeoutExpired as error:
            raise TimeLimitError("the code ran longer than it may") from error
        finally:
            self.kill()

    def kill(self) -> None:
        """End all of it, and wait until the output is closed."""
        stdout = self._process.stdout
        assert stdout is not None
        if stdout.closed:
            return
        self._process.kill()
        self._process.wait()
        until = time.monotonic() + TIDY_SECONDS
        while select([stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            if not os.read(stdout.fileno(), 1 << 20):
                break
        stdout.close()
        self.started = os.fstat(self._job).st_size == 0  # `sandboxed.main` empties it
        self._close()

    def _close(self) -> None:
        os.close(self._job)
        os.close(self._errors)

    def _read(self, most_bytes: int) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        parts: list[bytes] = []
        size = 0
        while select([stdout], [], [], self.seconds_left)[0]:
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > most_bytes:
                raise OutputLimitError(f"the code wrote more than {most_bytes} bytes")
        raise TimeLimitError("the code ran longer than it may")


def _file(content: bytes) -> int:
    descriptor = os.memfd_create("isobit")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


TMP_BYTES = 16 << 20
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
DEVICES = ("/dev/null", "/dev/urandom")


def shown() -> dict[str, str]:
    """Paths that the sandbox sees read-only: the path inside to the host's path."""
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
    return {**{str(path): str(path) for path in paths}, INSIDE: str(SANDBOXED_CODE)}


def links() -> dict[str, str]:
    """Symbolic links of the host through which libraries are found."""
    return {path: os.readlink(path) for path in LIBRARIES if os.path.islink(path)}


class Bubblewrap(Launcher):
    """``bwrap`` makes namespaces and root, and ends with its parent."""

    name = "bubblewrap"
    needs = ("bwrap",)
    dies_by_itself = True

    def command(self, python: Sequence[str]) -> list[str]:
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


class Namespaces(Launcher):
    """`sandboxed.namespaces` makes the namespaces, `sandboxed.kernel.build_root` the root."""

    name = "namespaces"

    def __init__(self, as_nobody: bool = False) -> None:
        self.as_nobody = as_nobody

    def command(self, python: Sequence[str]) -> list[str]:
        return list(python)

    def root(self) -> dict[str, Any]:
        return {"shown": shown(), "links": links(), "tmp_bytes": TMP_BYTES}


class Unsandboxed(Launcher):
    """Limits and the filter of system calls only. The code can read the user's files."""

    name = "none (unsandboxed = true)"

    def command(self, python: Sequence[str]) -> list[str]:
        return list(python)


def launchers() -> Sequence[Launcher]:
    """The ways to make a sandbox, in the order in which they are tried."""
    if os.geteuid() == 0:
        return (Namespaces(as_nobody=True), Bubblewrap(), Namespaces())
    return (Bubblewrap(), Namespaces())


@cache
def launcher(unsandboxed: bool) -> Launcher:
    """The first launcher that works here with threads, or else without, tried once in each process.

    Raises ``RewardError`` with the reasons if none works, unless ``unsandboxed``.
    """
    reasons: list[str] = []
    without_threads: Launcher | None = None
    for candidate in launchers():
        reason = trial(candidate)
        if reason is not None:
            reasons.append(f"{candidate.name}: {reason}")
        elif candidate.threads != 1:
            return candidate
        else:
            without_threads = without_threads or candidate
    if without_threads is not None:
        return without_threads
    bare = Unsandboxed()
    if unsandboxed and (reason := trial(bare)) is None:
        return bare
    raise RewardError(
        "code that a model wrote is run in a sandbox only, and none works here ("
        + "; ".join(reasons)
        + "); install bubblewrap, or allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone or user.max_user_namespaces; in a container, its seccomp "
        "profile), or give the grader unsandboxed = true, so that the code may do what you may"
    )


def trial(candidate: Launcher) -> str | None:
    """Why ``candidate`` does not work here; None if it does, and its ``threads`` are known then."""
    for program in candidate.needs:
        if shutil.which(program) is None:
            return f"there is no {program}"
    try:
        probe = Process("probe", {}, ProcessLimits(10.0, 256 << 20), candidate)
        output, exit_code = probe.finish(1000)
    except (SandboxError, TimeLimitError, OutputLimitError, OSError) as error:
        return str(error)
    if exit_code or not output.strip().isdigit():
        return f"programs cannot read Python's library there (exit code {exit_code})"
    candidate.threads = int(output)
    return None
