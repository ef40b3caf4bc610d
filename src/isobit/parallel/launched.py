"""What a process knows from its launcher, and what it tells it.  Needs no torch.

    ours, torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun              SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the master is the first
                      host of the step, its port comes from the numbers of job and step

``BlackBox`` is a page of memory, shared with our launcher, from which it reads why a rank has
ended:

    phase      the part of the run that it was in
    error      why it stops, as a user's error
    fault      the same of a fault in Isobit, whose traceback it prints
    lost       how it lost the connection to another rank
    code       the exit code that goes with it
    at         seconds of the host's monotonic clock, when one of them was written
    verdict    [rank, text]: it found another rank dead or silent

The signals that a run answers: SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGXCPU stop it with a
checkpoint, a second Ctrl-C at once; SIGUSR1 writes a checkpoint after the step.
"""

import ctypes
import json
import os
import re
import signal
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from isobit.util.errors import ConfigError

VARIABLE = "ISOBIT_LAUNCHER"
"""``pid:descriptor``: of the launcher, and of the page as the rank inherits it."""

_SIZE = 1 << 15
_LONGEST = 4000  # characters of a text, of at most six bytes of JSON each


class BlackBox:
    """The page of one rank, used by the launcher and the rank."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._entries: dict[str, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def made(cls) -> "BlackBox":
        """A new page, made by the launcher."""
        return cls(os.memfd_create("isobit-rank"))

    def write(self, **entries: Any) -> None:
        """Add or replace entries."""
        with self._lock:
            for name, value in entries.items():
                self._entries[name] = value[:_LONGEST] if isinstance(value, str) else value
            os.pwrite(self.descriptor, json.dumps(self._entries).encode().ljust(_SIZE, b"\0"), 0)

    def read(self) -> Mapping[str, Any]:
        """What the rank wrote last; nothing where it was killed while writing."""
        try:
            return json.loads(os.pread(self.descriptor, _SIZE, 0).rstrip(b"\0") or b"{}")
        except ValueError:
            return {}

    def close(self) -> None:
        os.close(self.descriptor)


_PR_SET_PDEATHSIG = 1
_PORTS = range(10_000, 30_000)  # below those that Linux assigns by itself


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (ours, torchrun, srun) has started this process as one of several."""
    return int(environment.get("WORLD_SIZE") or _tasks(environment)) > 1


def rank_of_host(environment: Mapping[str, str] = os.environ) -> int:
    """The rank among the processes of this host; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted all processes; its store keeps what the old ones wrote."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def take_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from SLURM's; those that are set stay.

    Raises ConfigError where one is missing.
    """
    if "WORLD_SIZE" not in environment:
        job, step = (int(environment.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
        given = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_PORTS[(job * 31 + step) % len(_PORTS)]),
        }
        for name, value in given.items():
            environment.setdefault(name, value)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {' and '.join(missing)} is not set; "
            "start the processes with torchrun or srun, or unset WORLD_SIZE and give "
            "--cluster.processes"
        )


def first_host(hosts: str) -> str:
    """``gpu[003-006,9],cpu1`` -> ``gpu003``: SLURM's notation."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]


def end_with_launcher() -> BlackBox | None:
    """Let the kernel end this process with our launcher; -> its black box, None without one."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    launcher, descriptor = (int(number) for number in given.split(":"))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it has ended before the line above
        os._exit(128 + signal.SIGKILL)
    # A terminal may stop background processes that write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    del os.environ[VARIABLE]  # what this process starts is no rank
    return BlackBox(descriptor)


def _tasks(environment: Mapping[str, str]) -> str:
    # SLURM_PROCID alone is also there in a batch script, which srun has not started.
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    return environment.get("SLURM_STEP_NUM_TASKS", "1") if is_step else "1"


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
SAVES = signal.SIGUSR1
