"""A program of several ranks without torch, for the launcher: ``python toy.py CASE``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from isobit.parallel.black_box import end_with_launcher


def main() -> None:
    """Rank 1 does what the case says, the others what goes with it."""
    box, rank, case = end_with_launcher(), int(os.environ["RANK"]), sys.argv[1]
    assert box is not None
    box.write(phase="training")
    if ignored := _IGNORED.get((case, rank)):  # before any test knows of this process
        signal.signal(ignored, signal.SIG_IGN)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
    if len(sys.argv) > 2 and sys.argv[2] != "--resume":
        Path(sys.argv[2], str(rank)).write_text(str(os.getpid()))
        while len(list(Path(sys.argv[2]).iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
    if rank != 1 and case != "both":
        _other(case)
    elif case in _CASES:
        _CASES[case]()
    elif case == "both":
        box.write(error="the disk is full", at=time.monotonic())
        sys.exit(2)
    elif case == "error":
        box.write(error="the disk is full", at=time.monotonic())
        time.sleep(0.2)  # the other notices, and is gone before
        sys.exit(2)
    elif case == "verdict":
        _sleep()


def _other(case: str) -> None:
    if case == "error":
        time.sleep(0.1)
        sys.exit(4)
    if case == "once" and "--resume" in sys.argv:
        return
    if case not in ("fine", "stdin"):
        _sleep()


def _exit_3() -> None:
    print("the last words", flush=True)
    subprocess.Popen(["sleep", "30"])  # holds the pipe open for longer than the rank lives
    sys.exit(3)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _once() -> None:
    if "--resume" not in sys.argv:
        _killed()


def _raise() -> None:
    raise ValueError("of a fault")


def _sleep() -> None:
    """Until a signal ends it.  One that comes between Python's last look for signals and the call
    of the kernel is noticed when that call has ended: so each is short.
    """
    while True:
        time.sleep(0.05)


def _stdin() -> None:
    assert sys.stdin.read() == ""


_CASES = {
    "exit": _exit_3,
    "deaf": _exit_3,
    "killed": _killed,
    "once": _once,
    "raise": _raise,
    "sleep": _sleep,
    "stdin": _stdin,
    "stubborn": _sleep,
}
_IGNORED = {("deaf", 0): signal.SIGTERM, ("stubborn", 1): signal.SIGINT}
"""By case and rank."""

if __name__ == "__main__":
    main()
