"""The program that the sandbox starts: it confines itself, then does its job.

    argv[1]   descriptor of the job, JSON:
      role       "candidate", "tests", "script" or "probe"
      limits     memory_bytes, cpu_seconds, file_bytes
      root       null if the root is already made, else shown, links, tmp_bytes
      privileged whether there are privileges to drop
      code, tests, entry_point   as the role needs
      incoming, outgoing         descriptors of the channel between candidate and tests

The file of the job is emptied after the confinement, so that its starter can distinguish a failed
sandbox from failed code.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from . import candidate, judge, kernel
from .wire import Channel

Job = dict[str, Any]


def main() -> None:
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb", closefd=False) as file:
        job: Job = json.load(file)
    if job["root"] is not None:
        kernel.build_root(**job["root"])
    if job["privileged"]:
        kernel.drop_capabilities()
    kernel.apply_limits(**job["limits"])
    kernel.refuse_dangerous_calls()
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    roles: dict[str, Callable[[Job], None]] = {
        "candidate": _candidate,
        "tests": _tests,
        "script": _script,
        "probe": lambda _: None,
    }
    roles[job["role"]](job)


def _silence() -> int:
    """Send standard output to /dev/null; returns a descriptor of the original."""
    output = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return output


def _candidate(job: Job) -> None:
    _silence()
    candidate.serve(Channel(job["incoming"], job["outgoing"]), job["code"])
    os._exit(0)


def _tests(job: Job) -> None:
    output = _silence()
    verdict = judge.judge(
        Channel(job["incoming"], job["outgoing"]), job["tests"], job["entry_point"]
    )
    os.write(output, json.dumps(verdict).encode("ascii"))
    os._exit(0)


def _script(job: Job) -> None:
    try:
        candidate.load(job["code"], "__main__")
    except MemoryError:
        os._exit(MEMORY)


MEMORY = 98
"""Exit code of a script that ran out of memory."""
