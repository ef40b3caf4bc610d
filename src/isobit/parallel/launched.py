"""How a process learns that a launcher has started it as one of several, by the environment.

    ours, torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun              SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the master is the first
                      host of the step, its port comes from the numbers of job and step

No torch is needed to ask.
"""

import ctypes
import os
import re
import signal
from collections.abc import Mapping, MutableMapping

from isobit.errors import ConfigError
from isobit.parallel.black_box import VARIABLE, BlackBox

_PR_SET_PDEATHSIG = 1
_PORTS = range(10_000, 30_000)
"""Below those that Linux hands out by itself."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (ours, torchrun, srun) has started this process as one of several."""
    return int(environment.get("WORLD_SIZE") or _tasks(environment)) > 1


def rank_of_host(environment: Mapping[str, str] = os.environ) -> int:
    """Of this process among those of its host; 0 where nobody has launched it."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has started all processes again; torchrun (``--max-restarts``) keeps
    what the dead ones have left in its store.
    """
    return int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def take_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Write what SLURM says in torch's words.  What is set already stays.

    Raises ConfigError where a word is missing.
    """
    if "WORLD_SIZE" not in environment:
        given = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_port(environment)),
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
    """Let the kernel end this process when our launcher ends, however that happens; -> its black
    box.  None, and nothing happens, where another launcher or none has started it.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    launcher, descriptor = (int(number) for number in given.split(":"))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it has ended before the line above
        os._exit(128 + signal.SIGKILL)
    # It is in the background of its terminal, where a terminal may be told to stop those who write.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    del os.environ[VARIABLE]  # what this process starts is no rank
    return BlackBox(descriptor)


def _tasks(environment: Mapping[str, str]) -> str:
    # SLURM_PROCID alone is also there in a batch script, which srun has not started.
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    return environment.get("SLURM_STEP_NUM_TASKS", "1") if is_step else "1"


def _port(environment: Mapping[str, str]) -> int:
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _PORTS[(job * 31 + step) % len(_PORTS)]
