"""A rank that is a child of this process.

Each is a process group of its own, so that Ctrl-C reaches the launcher alone, which hands it on
once.  The kernel ends it when this process ends, however that happens
(``isobit.parallel.launched.end_with_launcher``).
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isobit.parallel.black_box import VARIABLE, BlackBox
from isobit.run.cluster.deaths import Death
from isobit.run.cluster.ranks import Rank

_KEPT = 6000
"""Bytes of what a rank printed."""


class RankProcess(Rank):
    """``python ARGUMENTS`` in an environment that says which rank it is.

    What it prints goes where this process prints; or, with ``output``, there, as it is heard, and
    the last lines are kept.
    """

    def __init__(
        self,
        number: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Callable[[bytes], None] | None,
        directory: str | None = None,
    ) -> None:
        super().__init__(number)
        self._box = BlackBox.made()
        self._started_at = self._seen_at = self._ended_at = time.monotonic()
        self._memory: int | None = None
        self._output, self._said = output, b""
        self._process = subprocess.Popen(  # noqa: S603  (words, no shell)
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if output is None else subprocess.PIPE,
            stderr=None if output is None else subprocess.STDOUT,
            bufsize=0,
            process_group=0,
            pass_fds=(self._box.descriptor,),
            cwd=directory,
            env={
                **environment,
                "RANK": str(number),
                VARIABLE: f"{os.getpid()}:{self._box.descriptor}",
            },
        )
        self.pipe = self._process.stdout
        if self.pipe is not None:
            os.set_blocking(self.pipe.fileno(), False)

    @property
    def notes(self) -> Mapping[str, Any]:
        """See ``Rank``."""
        return self._box.read()

    @property
    def failed_at(self) -> float:
        """See ``Rank``."""
        return self.notes.get("at", self._seen_at)

    @property
    def code(self) -> int:
        """See ``Rank``."""
        return self.death().code

    def is_running(self) -> bool:
        """See ``Rank``."""
        if self.exit_code is None:
            now = time.monotonic()
            found, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if found == 0:
                self._seen_at = now
                return True
            self._ended_at, self._memory = now, usage.ru_maxrss << 10
            self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
            self.hear()
        return False

    def hear(self) -> None:
        """Hand on what it has printed, and keep the last of it."""
        if self.pipe is None or self._output is None:
            return
        try:
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                self._output(chunk)
                self._said = (self._said + chunk)[-_KEPT:]
            self.pipe.close()
            self.pipe = None
        except BlockingIOError:
            pass  # no more for now

    def send(self, number: int) -> None:
        """See ``Rank``."""
        if self.exit_code is None:
            os.kill(self._process.pid, number)

    def describe(self) -> str:
        """See ``Rank``."""
        return self.death().describe()

    def death(self) -> Death:
        """How it ended."""
        assert self.exit_code is not None
        said = self._said.decode("utf-8", "replace").splitlines()[-20:]
        return Death(
            self.number,
            socket.gethostname(),
            self._process.pid,
            self.exit_code,
            self.notes.get("phase"),
            self._ended_at - self._started_at,
            self._memory,
            None if self._output is None else "\n".join(said),
        )

    def close(self) -> None:
        """See ``Rank``."""
        if self.is_running():
            self._process.send_signal(signal.SIGKILL)
            _, status = os.waitpid(self._process.pid, 0)
            self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
        if self.pipe is not None:
            self.pipe.close()
        self._box.close()


def wait_for_output(ranks: Sequence[RankProcess], seconds: float) -> list[RankProcess]:
    """Those that have printed something, as soon as there is one."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if rank.pipe is not None:
                selector.register(rank.pipe, selectors.EVENT_READ, rank)
        if not selector.get_map():
            time.sleep(seconds)
            return []
        return [key.data for key, _ in selector.select(seconds)]
