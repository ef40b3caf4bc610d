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
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_PORTS[(job * 31 + step) % len(_PORTS)]),
        }
        for name, value in variables.items():
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


def _tasks(environment: Mapping[str, str]) -> str:
    # SLURM_PROCID alone is also there in a batch script, which srun has not started.
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    return environment.get("SLURM_STEP_NUM_TASKS", "1") if is_step else "1"


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
SAVES = signal.SIGUSR1
