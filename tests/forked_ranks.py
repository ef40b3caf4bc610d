"""Ranks that a launcher forks: they have what it has imported, where a program would import torch
anew, which takes seconds.  All else is a program's: the process is the launcher's own child, with
its group, files, environment and exit code.

The launcher must be a fresh process itself (``tests.forked``), so that its ranks inherit nothing
from other tests.  ``/proc/PID/comm`` of a rank says ``rank N``: its environment is not in /proc.
"""

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from isobit.cli.main import main
from isobit.launch import local as launch


def fork_ranks() -> None:
    """From now on, in this process."""
    launch.subprocess = _Subprocess("subprocess")


class _Subprocess(ModuleType):
    """The module, for the launcher's eyes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(  # noqa: N802
        self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int, ...], **how: Any
    ) -> Any:
        """``python -P ARGUMENTS``, forked."""
        return forked(words, env, pass_fds, **how)


def forked(
    args: Sequence[str], env: Mapping[str, str], pass_fds: tuple[int, ...] = (), **how: Any
) -> subprocess.Popen[Any]:
    """``subprocess.Popen`` of ``python -FLAG ARGUMENTS``: ``preexec_fn`` never returns to begin a
    program.
    """

    def begin() -> None:
        _be_a_program(args[2:], env, pass_fds)

    return subprocess.Popen(args, pass_fds=pass_fds, preexec_fn=begin, **how)  # noqa: PLW1509


def _be_a_program(words: Sequence[str], environ: Mapping[str, str], kept: tuple[int, ...]) -> None:
    """What the interpreter does at its start and at its end, and the program between."""
    code: Any = 1
    try:
        _forget_the_launcher(kept)
        os.environ.clear()
        os.environ.update(environ)
        Path("/proc/self/comm").write_text(f"rank {environ['RANK']}")
        code = _obey(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _forget_the_launcher(kept: tuple[int, ...]) -> None:
    """Its files, streams and signal handlers."""
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):  # that of the listing
                os.close(number)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _obey(words: Sequence[str]) -> Any:
    """``-m isobit.cli.main ..``, or ``PROGRAM.py ..``"""
    if words[:2] == ["-m", "isobit.cli.main"]:
        return main(words[2:])
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
    return 0
