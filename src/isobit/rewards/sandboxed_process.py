"""One process in the sandbox, from its start to its end, which is the end of all that it started.

It is given its job, and its input, as files that live in memory; its output is read from a pipe,
up to a bound and a deadline.
"""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any, Literal

Role = Literal["candidate", "tests", "script", "probe"]
FILE_BYTES = 16 << 20
CONFINED = Path(__file__).parent / "confined"
INSIDE = "/isobit/confined"
"""Where the sandbox sees `isobit.rewards.confined`."""
TIDY_SECONDS = 5.0


class TimeLimitError(Exception):
    """Code that did not end in time; all of it has been killed."""


class SandboxError(Exception):
    """A sandbox that could not be made this time; the code has not run."""


class OutputLimitError(Exception):
    """Code that wrote more than is read of it; all of it has been killed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process may use: seconds of wall-clock time, bytes of memory."""

    seconds: float
    memory_bytes: int


class Launcher(ABC):
    """How a process is put into a sandbox."""

    name: str
    needs: tuple[str, ...] = ()
    """Programs that must be there."""
    privileged: bool = False
    """Whether `confined.main` has privileges to drop."""

    @abstractmethod
    def command(self, python: Sequence[str]) -> list[str]:
        """The command that runs ``python``, a command too, in the sandbox."""

    def root(self) -> dict[str, Any] | None:
        """What is left for `confined.root.build`; None where ``command`` makes the root."""
        return None


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class Process:
    """One process in the sandbox, from start to end.

    ``job`` is what its role needs (`confined.main`); ``pass_fds`` are descriptors it keeps;
    ``stdin`` bytes that it reads.  Its output is a pipe.
    """

    def __init__(
        self,
        role: Role,
        job: dict[str, Any],
        limits: Limits,
        launched_by: Launcher,
        *,
        stdin: bytes = b"",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.deadline = time.monotonic() + limits.seconds
        self.started = False
        """Known once it has ended: whether it came as far as the code."""
        bounds = {
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": int(limits.seconds) + 1,
            "file_bytes": FILE_BYTES,
        }
        described = {
            **job,
            "role": role,
            "limits": bounds,
            "root": launched_by.root(),
            "privileged": launched_by.privileged,
        }
        self._job = _file(json.dumps(described).encode("ascii"))
        self._errors = _file(b"")
        boot = "import sys; sys.path[:0] = sys.argv[2:]; from confined.main import main; main()"
        python = [interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", boot, str(self._job)]
        python += [os.path.dirname(INSIDE), str(CONFINED.parent)]
        given = _file(stdin)
        try:
            self._process = subprocess.Popen(  # noqa: S603  (words, no shell)
                launched_by.command(python),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
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
        """Wall-clock time until its deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def finish(self, most_bytes: int) -> tuple[bytes, int]:
        """All output and the exit code.  Nothing of it runs any more when this returns or raises.

        Raises TimeLimitError, OutputLimitError, and SandboxError where the code never ran.
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
        """End all of it, and wait until it has ended: its output is then at its end."""
        stdout = self._process.stdout
        assert stdout is not None, "it is a pipe"
        if stdout.closed:
            return
        self._process.kill()
        self._process.wait()
        until = time.monotonic() + TIDY_SECONDS
        while select([stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            if not os.read(stdout.fileno(), 1 << 20):
                break
        stdout.close()
        self.started = os.fstat(self._job).st_size == 0  # `confined.main` empties it
        self._close()

    def _close(self) -> None:
        os.close(self._job)
        os.close(self._errors)

    def _read(self, most_bytes: int) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None, "it is a pipe"
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
    """A descriptor to read ``content`` from."""
    descriptor = os.memfd_create("isobit")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
