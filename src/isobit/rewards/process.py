"""The trainer's side of one process that grades: starts it clean, hands it work, hears it, ends it.

The process is a new one of the interpreter, in a session of its own: it inherits no descriptor, so
no lock, and no state of the trainer.  Nothing here waits for it but ``end``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from isobit.rewards.wire import LINE_LIMIT, frame, read_line
from isobit.rewards.worker import Start

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_END_S = 3.0
"""How long a process that was told to end may take for it."""
_NOISE = 1500


class GraderProcess:
    """One process and its pipes."""

    def __init__(self, start: Start) -> None:
        """Begin to start it.  Raises whatever ``subprocess.Popen`` raises."""
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            # -P: a file json.py in the working directory is no module of ours
            [sys.executable, "-P", "-m", "isobit.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # of an interpreter that does not come up
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self.requests, self.replies):
            os.set_blocking(descriptor, False)
        self._unsent, self._unread, self._noise = bytearray(frame(start)), bytearray(), ""
        self.is_gone = False
        """Whether it has ended, and all that it said was heard."""
        self._exit: str | None = None

    @property
    def is_sending(self) -> bool:
        """Whether there is something that it has not taken yet."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Hand it a frame; what its pipe does not take now goes with ``flush``."""
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Write what its pipe takes."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests, memoryview(self._unsent)[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:  # it is gone, which ``read`` finds out
            self._unsent.clear()

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The messages that have come."""
        self.is_gone = self._process.poll() is not None  # all that it said is in the pipe by now
        try:
            while chunk := os.read(self.replies, 1 << 16):
                self._unread += chunk
                yield from self._lines()
                if len(self._unread) > LINE_LIMIT:  # no line of ours
                    self._keep_noise(bytes(self._unread))
                    self._unread.clear()
            self.is_gone = True
        except BlockingIOError:
            pass  # one of its children may hold the pipe open for longer than it lives
        if self.is_gone:
            self._keep_noise(bytes(self._unread))
            self._unread.clear()

    def how_it_ended(self) -> str:
        """What became of a process that is gone, with the end of what it printed."""
        code = self._process.wait()
        return self._exit or _exit_text(code, self._noise)

    def end(self) -> None:
        """End it with all of its children; waits for that."""
        self.dismiss()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def dismiss(self) -> None:
        """Tell it to end, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread[:] = rest
        for line in lines:
            content = read_line(line)
            if content is None:
                self._keep_noise(line)
            elif "ended" in content:
                self._exit = _exit_text(content["ended"], content.get("output"))
            else:
                yield content

    def _keep_noise(self, printed: bytes) -> None:
        self._noise = (self._noise + printed.decode("utf-8", "replace") + "\n")[-_NOISE:]


def _exit_text(code: Any, output: Any) -> str:
    """``its process was killed by SIGSEGV; the last it printed was ..``."""
    if isinstance(code, int) and code < 0:
        try:
            text = f"its process was killed by {signal.Signals(-code).name}"
        except ValueError:
            text = f"its process was killed by signal {-code}"
    else:
        text = f"its process ended with exit code {code}"
    printed = " ".join(str(output or "").split())
    fault = printed.find("Fatal Python error")  # the frames below it are in the order of blame
    last = printed[fault : fault + 500] if fault >= 0 else printed[-500:]
    return f"{text}; the last it printed was {last!r}" if last else text
