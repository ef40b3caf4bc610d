"""Several processes of one command on this host: started together, and ended together.

    launcher ──> rank 0    the terminal is its own
             ──> rank 1    what it prints is kept, its last lines, and shown if it fails
             ──> ..        each with a black box (`isobit.parallel.black_box`)

The launcher computes nothing and imports no torch.  When a rank ends with an error, the others are
asked to end, and killed after a while: they may wait in a collective for the one that is gone.
When the launcher itself is killed, the kernel ends the ranks.  Every rank is a process group of its
own, so that Ctrl-C reaches the launcher alone, which hands it on once: the ranks then stop where it
is safe.  A second one ends them at once.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from isobit.errors import Interrupted, PeerError
from isobit.memory.machine import usable_cores
from isobit.parallel.black_box import VARIABLE, BlackBox
from isobit.run.cluster.deaths import Death, RankError

KILL_S = 10.0
"""Between asking a rank to end and killing it."""
ORDERLY_S = 60.0
"""For the others to end by themselves, where a rank said why it ends: they may still be writing."""
_POLL_S = 0.05
_KEPT = 6000
"""Bytes of what a rank printed."""


def launch(
    arguments: Sequence[str],
    size: int,
    threads: int | None = None,
    kill_s: float = KILL_S,
    orderly_s: float = ORDERLY_S,
) -> None:
    """``python ARGUMENTS`` in ``size`` processes with ``threads`` CPU threads each (None: the cores
    are shared out), until all have ended without an error.

    Raises RankError with the one reason where one failed, and Interrupted where all stopped on a
    signal; nothing of them runs any more then.
    """
    launched = _Launched(arguments, size, _environment(size, threads))
    try:
        with launched.forwarding():
            launched.watch(kill_s, orderly_s)
        launched.check()
    finally:
        launched.close()


def _environment(size: int, threads: int | None) -> dict[str, str]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if threads is None:
        cores = usable_cores()
        each = found.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
        said = f"{cores} cores, {each} to each; the key threads sets it"
    else:
        said = f"{threads} threads each"
    print(f"{size} processes on {socket.gethostname()}: {said}", flush=True)
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class _Launched:
    """All ranks, from their start to the end of the last."""

    def __init__(self, arguments: Sequence[str], size: int, environment: Mapping[str, str]) -> None:
        self._signal: signal.Signals | None = None
        self._signals = 0
        self._kill_at: float | None = None
        self._ranks: list[_Rank] = []
        try:
            for number in range(size):
                self._ranks.append(_Rank(number, arguments, environment))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """A block in which signals to this process reach the ranks.  Those that its caller has
        switched off (``nohup``) stay so.
        """
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch(self, kill_s: float, orderly_s: float) -> None:
        """Until no rank runs.  From the first failure on the others have ``orderly_s`` to end, or
        none where it did not say why it ended; then they are asked, and after ``kill_s`` killed.
        """
        asked = False
        ask_at: float | None = None
        while running := self._running():
            self._hear(running)
            now = time.monotonic()
            failed = [rank for rank in self._ranks if rank.exit_code]
            if failed and ask_at is None:
                ask_at = now + (orderly_s if failed[0].has_said_why else 0)
            if ask_at is not None and now >= ask_at and not asked:
                asked = True
                for rank in running:
                    rank.end(signal.SIGTERM)
                self._kill_at = min(self._kill_at or now + kill_s, now + kill_s)
            if self._signals > 1 and self._kill_at is None:
                self._kill_at = now + kill_s
            if self._kill_at is not None and now >= self._kill_at:
                for rank in running:
                    rank.end(signal.SIGKILL)

    def check(self) -> None:
        """Raise for what went wrong, if anything did."""
        failed = [rank for rank in self._ranks if rank.exit_code]
        if not failed:
            return
        if self._signal is not None and all(rank.stopped_by(self._signal) for rank in failed):
            raise Interrupted(self._signal.name, self._signal)
        first = min(failed, key=lambda rank: rank.order)
        code = first.notes.get("code") or first.death().code
        raise RankError(self._reason(first, failed), code)

    def close(self) -> None:
        """End what still runs, and give everything back."""
        for rank in self._ranks:
            rank.close()

    def _running(self) -> list["_Rank"]:
        return [rank for rank in self._ranks if rank.is_running()]

    def _hear(self, running: Sequence["_Rank"]) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in running:
                if rank.pipe is not None:
                    selector.register(rank.pipe, selectors.EVENT_READ, rank)
            if not selector.get_map():
                time.sleep(_POLL_S)
            for key, _ in selector.select(_POLL_S):
                key.data.hear()

    def _reason(self, first: "_Rank", failed: Sequence["_Rank"]) -> str:
        verdicts = [rank.notes["verdict"] for rank in self._ranks if "verdict" in rank.notes]
        for number, text in verdicts:
            if number in (None, first.number):
                return text
        error = first.notes.get("error") or first.notes.get("lost")
        if error is None:
            return first.death().describe()
        errors = {rank.notes["error"] for rank in failed if "error" in rank.notes}
        alone = sum("error" in rank.notes for rank in failed) == 1
        return f"rank {first.number}: {error}" if alone or len(errors) > 1 else error

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._signal = self._signal or signal.Signals(number)
        if self._signals > 2:
            self._kill_at = time.monotonic()
        for rank in self._ranks:
            rank.send(number)


class _Rank:
    """One process."""

    def __init__(
        self, number: int, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.number = number
        self.exit_code: int | None = None
        """Once it has ended; negative: a signal's number."""
        self._box = BlackBox.made()
        self._started_at = self._seen_at = self._ended_at = time.monotonic()
        self._memory: int | None = None
        self._said = b""
        self._was_ended = False
        first = number == 0
        self._process = subprocess.Popen(  # noqa: S603  (words, no shell)
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.PIPE,
            stderr=None if first else subprocess.STDOUT,
            bufsize=0,
            process_group=0,
            pass_fds=(self._box.descriptor,),
            env={
                **environment,
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                VARIABLE: f"{os.getpid()}:{self._box.descriptor}",
            },
        )
        self.pipe = self._process.stdout
        if self.pipe is not None:
            os.set_blocking(self.pipe.fileno(), False)

    @property
    def notes(self) -> Mapping[str, Any]:
        """Its black box."""
        return self._box.read()

    @property
    def has_said_why(self) -> bool:
        """Whether it ended in order: with an error that a user can meet, on a signal, or since it
        knew of another's end.
        """
        orderly = (128 + signal.SIGINT, 128 + signal.SIGTERM, PeerError.exit_code)
        return "error" in self.notes or self.exit_code in orderly

    @property
    def order(self) -> tuple[bool, float]:
        """Among those that failed, the least is the one that began: those that were ended, or
        stopped since another had failed, come last.
        """
        follows = self._was_ended or self.exit_code == PeerError.exit_code
        return follows, self.notes.get("at", self._seen_at)

    def is_running(self) -> bool:
        """Whether it still runs, as of now."""
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
        """Keep the last of what it printed."""
        if self.pipe is None:
            return
        try:
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                self._said = (self._said + chunk)[-_KEPT:]
            self.pipe.close()
            self.pipe = None
        except BlockingIOError:
            pass  # no more for now

    def send(self, number: int) -> None:
        """A signal that it may answer as it likes."""
        if self.exit_code is None:
            os.kill(self._process.pid, number)

    def end(self, number: int) -> None:
        """A signal after which its end is no failure of its own."""
        self._was_ended = True
        self.send(number)

    def stopped_by(self, number: int) -> bool:
        """Whether that signal is what ended it."""
        return self._was_ended or self.exit_code in (128 + number, -number, PeerError.exit_code)

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
            None if self.number == 0 else "\n".join(said),
        )

    def close(self) -> None:
        """End it, if it still runs, and give back its pipe and page."""
        if self.is_running():
            self._process.kill()
            _, status = os.waitpid(self._process.pid, 0)
            self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
        if self.pipe is not None:
            self.pipe.close()
        self._box.close()
