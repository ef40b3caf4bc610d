"""Processes for a test that need not import torch, which takes seconds: they are forked by one
that has.  ``command(["train", "my.toml"], log)`` starts ``isobit train my.toml`` so.
"""

import os
import signal
import sys
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from isobit.cli.main import main


@cache
def warm() -> ForkServerContext:
    """Its processes have imported what a run imports; nothing of it has run."""
    loops = ["isobit.run.rl.loop", "isobit.run.sft.loop"]
    context = get_context("forkserver")
    context.set_forkserver_preload([*loops, "isobit.observe.events", "pytest"])
    return context


def become(environ: dict[str, str], folder: Path, log: Path) -> None:
    """Take over where and how this process runs; what it prints goes to the log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    with log.open("w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)


def command(arguments: list[str], log: Path) -> BaseProcess:
    """A command of isobit, running."""
    process = warm().Process(target=_run, args=(arguments, dict(os.environ), Path.cwd(), log))
    process.start()
    return process


def _run(arguments: list[str], environ: dict[str, str], folder: Path, log: Path) -> None:
    become(environ, folder, log)
    sys.exit(main(arguments))
