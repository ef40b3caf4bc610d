"""What a process knows from its launcher, and the signals that it answers.  Needs no torch.

    ours, torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun              SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the master is the first
                      host of the step, its port comes from the numbers of job and step

SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGXCPU stop a run with a checkpoint, a second Ctrl-C at once;
SIGUSR1 writes a checkpoint after the step.
"""

import os
import re
import signal
from collections.abc import Mapping, MutableMapping

from isobit.util.errors import ConfigError

_PORTS = range(10_000, 30_000)  # below those that Linux assigns by itself


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (ours, torchrun, srun) has started this process as one of several, or
    says of how many in a form that ``take_place`` refuses.
    """
    count = environment.get("WORLD_SIZE") or _tasks(environment)
    return not count.isdecimal() or int(count) > 1


def rank_of_host(environment: Mapping[str, str] = os.environ) -> int:
    """The rank among the processes of this host; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted all processes; its store keeps what the old ones wrote."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def take_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from SLURM's; those that are set stay.

    Raises ConfigError where one is missing, or is no number that it can be.
    """
    if not environment.get("WORLD_SIZE"):
        job, step = (_number(f"SLURM_{name}_ID", environment) for name in ("JOB", "STEP"))
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_PORTS[(job * 31 + step) % len(_PORTS)]),
        }
        for name, value in variables.items():
            environment[name] = environment.get(name) or value
    last = _number("WORLD_SIZE", environment) - 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {' and '.join(missing)} {are} not "
            f"set; {_REMEDY}"
        )
    for name, most in {
        "RANK": last,
        "LOCAL_RANK": last,
        "SLURM_LOCALID": None,  # of an outer step, where torchrun started this process
        "MASTER_PORT": 65_535,
        "TORCHELASTIC_RESTART_COUNT": None,
    }.items():
        _number(name, environment, most)


_REMEDY = (
    "start the processes with torchrun or srun, or unset WORLD_SIZE and give --cluster.processes"
)


def _number(name: str, environment: Mapping[str, str], most: int | None = None) -> int:
    """A variable's number from 0 on; 0 where it is not set.  Raises ConfigError."""
    text = environment.get(name) or "0"
    if text.isdecimal() and (most is None or int(text) <= most):
        return int(text)
    bounds = "0 or more" if most is None else f"0 to {most}"
    raise ConfigError(f"{name} is {text!r}; expected a whole number, {bounds}: {_REMEDY}")


def first_host(hosts: str) -> str:
    """``gpu[003-006,9],cpu1`` -> ``gpu003``: SLURM's notation."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _tasks(environment: Mapping[str, str]) -> str:
    # SLURM_PROCID alone is also there in a batch script, which srun has not started.
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    return environment.get("SLURM_STEP_NUM_TASKS", "1") if is_step else "1"


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
SAVES = signal.SIGUSR1
