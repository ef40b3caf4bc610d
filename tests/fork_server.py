"""The process that forks those of ``tests.forked`` and ``tests.worlds``: it has imported what a run
imports; nothing of it has run.

The workers of pytest-xdist share one.  ``multiprocessing`` gives each process a server of its own,
which takes nine seconds of a core to import the same; it has no public way to use another's.
"""

import os
from multiprocessing import forkserver
from typing import Any

IMPORTED = [
    "isobit.run.rollouter_process",
    "isobit.run.sft",
    "tensorboard.summary.writer.record_writer",
    "tensorboard.plugins.text.metadata",
    "reasoning_gym",
    "pytest",
    "tests.frozen",
]


def start() -> str:
    """A server that lives as long as this process, and its address."""
    forkserver.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return server._forkserver_address


def use(address: str) -> None:
    """From now on the server at this address forks the processes of this one."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = lambda: None
