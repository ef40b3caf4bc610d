"""What the sandbox starts: confinement first, then the part that the job names.

    argv[1]   descriptor of the job, JSON:
      role       "candidate", "tests", "script" or "probe"
      limits     memory_bytes, cpu_seconds, file_bytes
      root       null where the root is already made, else shown, links, tmp_bytes
      privileged whether there are privileges to drop
      code, tests, entry_point   as the role needs
      incoming, outgoing         descriptors of the conversation between candidate and tests

The job is emptied once this process is confined: whoever started it can tell a sandbox that failed
from code that did.
"""

import json
import os
import sys
from typing import Any

from . import calls, candidate, judge, kernel
from .wire import Channel

Job = dict[str, Any]


def main() -> None:
    """Read the job, confine this process, and do it."""
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb", closefd=False) as file:
        job: Job = json.load(file)
    if job["root"] is not None:
        kernel.build_root(**job["root"])
    if job["privileged"]:
        kernel.drop_capabilities()
    kernel.apply_limits(**job["limits"])
    calls.refuse_dangerous_calls()
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    {"candidate": _candidate, "tests": _tests, "script": _script, "probe": _probe}[job["role"]](job)


def _silence() -> int:
    """Send what is printed from now on nowhere; the descriptor of the output as it was."""
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


def _probe(job: Job) -> None:
    del job


MEMORY = 98
"""Exit code of a script that ran out of memory."""
