"""Processes for a test that need not import torch, which takes seconds: they are forked by one
that has.  ``command(["train", "my.toml"], log)`` starts ``isobit train my.toml`` so, and
``ran("isobit.cli.main:main", folder, ["train", "my.toml"])`` is what came of it.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from isobit.launch.local import launch
from isobit.launch.ranks import RankError
from tests import fork_server
from tests.forked_ranks import fork_ranks

AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""For a process on a machine without AVX-512: the instructions are chosen at torch's first use."""


def warm() -> ForkServerContext:
    """Its processes have imported what a run imports; nothing of it has run."""
    context = get_context("forkserver")
    context.set_forkserver_preload(fork_server.IMPORTED)
    return context


def become(environ: dict[str, str], folder: Path, log: Path, errors: Path | None = None) -> None:
    """Take over where and how this process runs; what it prints goes to the log, or to two."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    with log.open("w") as said, (errors or log).open("a") as complained:
        os.dup2(said.fileno(), 1)
        os.dup2(complained.fileno() if errors else said.fileno(), 2)


def command(arguments: list[str], log: Path, errors: Path | None = None) -> BaseProcess:
    """A command of isobit, running, whose ranks are forked too; what it says on standard error is
    in a file of its own where one is given.
    """
    return called("isobit.cli.main:main", log, arguments, errors=errors)


def called(
    target: str,
    log: Path,
    *arguments: Any,
    errors: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    spawn: bool = False,
) -> BaseProcess:
    """A process that ends with the exit code that a function of a module gives; the launcher of
    ranks, in it, forks them.  ``spawn``: it is not forked, and may use a GPU.
    """
    place = dict(environ), Path.cwd(), log, errors
    context = get_context("spawn") if spawn else warm()
    process = context.Process(target=_run, args=(target, arguments, *place))
    process.start()
    return process


def ran(
    target: str,
    folder: Path,
    *arguments: Any,
    environ: Mapping[str, str] = os.environ,
    spawn: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` says of such a process; its output goes through files of the
    folder.
    """
    out, errors = folder / "stdout", folder / "stderr"
    errors.unlink(missing_ok=True)
    process = called(target, out, *arguments, errors=errors, environ=environ, spawn=spawn)
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(
        [target, *arguments], process.exitcode, out.read_text(), errors.read_text()
    )


def be_module(name: str, *words: str) -> None:
    """For ``ran``: ``python -m name words``."""
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class Launched:
    """So many ranks of a program, of a thread each, under our launcher."""

    def __init__(self, arguments: list[str], log: Path, size: int = 2) -> None:
        self._log, self._told = log, log.with_suffix(".end")
        self._process = called("tests.forked:launch_and_tell", log, arguments, size, self._told)

    def end(self) -> RankError | None:
        """How they have ended, once they have."""
        self._process.join()
        assert self._process.exitcode == 0, self._log.read_text()
        end = json.loads(self._told.read_text())
        return None if end is None else RankError(**end)


def launch_and_tell(arguments: list[str], size: int, told: Path) -> None:
    """For ``Launched``, in a process of its own."""
    end: dict[str, Any] | None = None
    try:
        launch(arguments, size, threads=1)
    except RankError as error:
        end = {"text": str(error), "exit_code": error.exit_code, "died": error.died}
    told.write_text(json.dumps(end))


def _run(
    target: str,
    arguments: tuple[Any, ...],
    environ: dict[str, str],
    folder: Path,
    log: Path,
    errors: Path | None,
) -> None:
    become(environ, folder, log, errors)
    fork_ranks()
    module, _, function = target.partition(":")
    sys.exit(getattr(import_module(module), function)(*arguments))
