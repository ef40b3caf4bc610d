"""Several processes of one command on this host: started together, and ended together.

    launcher ──> rank 0    the terminal is its own
             ──> rank 1    what it prints is kept, its last lines, and shown if it fails
             ──> ..        each with a black box (`isobit.parallel.black_box`)

The launcher computes nothing and imports no torch.  When it is killed, the kernel ends the ranks.
Ctrl-C reaches the launcher alone, which hands it on once: the ranks then stop where it is safe.  A
second one ends them at once.

A rank that is a child of this process.

Each is a process group of its own, so that Ctrl-C reaches the launcher alone, which hands it on
once.  The kernel ends it when this process ends, however that happens
(``isobit.parallel.black_box.end_with_launcher``).

Ranks that were lost, and the run that goes on without a hand (``cluster.restarts``).
"""

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

from isobit.launch.rank_failure import RankFailure
from isobit.launch.ranks import KILL_S, ORDERLY_S, Rank, RankError
from isobit.launch.rollouter_restarts import ranks_with
from isobit.parallel.black_box import VARIABLE, BlackBox
from isobit.parallel.restart_page import RestartPage
from isobit.util.machine import usable_cores
from isobit.util.terminal import say

_KEPT = 1 << 16
"""Bytes of a rank's output that are kept."""
_FRAME = re.compile(r"\s*frame #\d+: ")
"""A frame of a C++ stack; torch.distributed prints dozens behind the traceback of a rank."""


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
        shared: Sequence[int] = (),
    ) -> None:
        """``shared`` are descriptors that it inherits beside that of its black box."""
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
            pass_fds=(self._box.descriptor, *shared),
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
        return self._box.read()

    @property
    def failed_at(self) -> float:
        return self.notes.get("at", self._seen_at)

    @property
    def code(self) -> int:
        return self.death().code

    def is_running(self) -> bool:
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
        if self.exit_code is None:
            os.kill(self._process.pid, number)

    def describe(self) -> str:
        return self.death().describe()

    def death(self) -> RankFailure:
        """How it ended."""
        assert self.exit_code is not None
        said = self._said.decode("utf-8", "replace").splitlines()
        said = [line for line in said if not _FRAME.match(line)][-20:]
        return RankFailure(
            self.number,
            socket.gethostname(),
            self._process.pid,
            self.exit_code,
            self.notes.get("phase"),
            self._ended_at - self._started_at,
            self._memory,
            None if self._output is None else "\n".join(said),
            self.notes.get("fault"),
        )

    def close(self) -> None:
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


_POLL_S = 0.05


def launch(
    arguments: Sequence[str],
    size: int,
    threads: int | None = None,
    kill_s: float = KILL_S,
    orderly_s: float = ORDERLY_S,
    rollouters: int = 0,
) -> None:
    """``python ARGUMENTS`` in ``size`` processes with ``threads`` CPU threads each (None: the cores
    are shared out), until all have ended without an error.  The last ``rollouters`` of them are
    started again where one is killed.

    Raises RankError with the one reason where one failed, and Interrupted where all stopped on a
    signal; nothing of them runs any more then.
    """
    environment, ranks = _environment(size, threads), list[RankProcess]()
    with closing(RestartPage.made(rollouters)) if rollouters else nullcontext() as page:

        def start(number: int, of: int = 0) -> RankProcess:
            place, shared = {**environment, "LOCAL_RANK": str(number)}, list[int]()
            if page is not None:
                page.enter(place, of)
                shared.append(page.descriptor)
            output = None if number == 0 else _only_kept
            return RankProcess(number, arguments, place, output, shared=shared)

        try:
            for number in range(size):
                ranks.append(start(number))
        except BaseException:
            for rank in ranks:
                rank.close()
            raise

        def hear() -> None:
            for rank in wait_for_output(ranks, _POLL_S):
                rank.hear()

        ranks_with(page, ranks, hear, start).run(kill_s, orderly_s)


def _only_kept(said: bytes) -> None:
    """Show nothing of a rank's output."""


def path_of_modules() -> str:
    """``PYTHONPATH`` for a process that finds the modules that this one does."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def _environment(size: int, threads: int | None) -> dict[str, str]:
    found = {
        **os.environ,
        "PYTHONPATH": path_of_modules(),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if threads is None:
        cores = usable_cores()
        each = found.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
        said = f"{cores} cores, {each} to each; the key threads sets it"
    else:
        said = f"{threads} threads each"
    say(f"{size} processes on {socket.gethostname()}: {said}", "stdout")
    return found


RESUME = "--resume"


def with_restarts(
    start: Callable[[Sequence[str], bool], None], arguments: Sequence[str], restarts: int
) -> None:
    """``start(arguments, False)``, and again as ``start(.., True)`` with ``--resume`` where a rank
    has died, at most so often.

    A rank that stopped for a reason it knew (a disk that is full, a key that is wrong) would do so
    again: its RankError is raised at once, as everything else is.
    """
    words = list(arguments)
    for left in reversed(range(restarts + 1)):
        try:
            start(words, left < restarts)
        except RankError as error:
            if not error.died or not left:
                raise
            say(f"{error}\nstarted again with {RESUME}; restarts left: {left - 1}")
        else:
            return
        if RESUME not in words:
            words.append(RESUME)
