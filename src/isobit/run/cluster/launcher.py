"""Several processes of one command on this host: started together, and ended together.

    launcher ──> rank 0    the terminal is its own
             ──> rank 1    what it prints is kept, its last lines, and shown if it fails
             ──> ..        each with a black box (`isobit.parallel.black_box`)

The launcher computes nothing and imports no torch.  When it is killed, the kernel ends the ranks.
Ctrl-C reaches the launcher alone, which hands it on once: the ranks then stop where it is safe.  A
second one ends them at once.
"""

import os
import socket
import sys
from collections.abc import Sequence

from isobit.memory.machine import usable_cores
from isobit.run.cluster.process import RankProcess, wait_for_output
from isobit.run.cluster.ranks import KILL_S, ORDERLY_S, Ranks
from isobit.terminal import say

_POLL_S = 0.05


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
    environment = _environment(size, threads)
    ranks: list[RankProcess] = []
    try:
        for number in range(size):
            place = {**environment, "LOCAL_RANK": str(number)}
            output = None if number == 0 else _only_kept
            ranks.append(RankProcess(number, arguments, place, output))
    except BaseException:
        for rank in ranks:
            rank.close()
        raise

    def hear() -> None:
        for rank in wait_for_output(ranks, _POLL_S):
            rank.hear()

    Ranks(ranks, hear).run(kill_s, orderly_s)


def _only_kept(said: bytes) -> None:
    """Of a rank that is not shown."""


def path_of_modules() -> str:
    """``PYTHONPATH`` for a process that finds the modules that this one does."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
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
