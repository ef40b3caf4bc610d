"""The table ``cluster``: the processes of a run.  None of its keys changes a byte of what the run
learns.
"""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_COUNT, MAX_PROCESSES

Launcher = Literal["local", "ray"]


class EngineConfig(Strict):
    """Who samples, where nothing is trained."""

    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy that one GPU cannot hold: each has a part of
    every linear's outputs, and the bits are those of one.
    """


class ClusterConfig(Strict):
    """Who computes."""

    processes: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """One a GPU, or on CPUs as many as there are cores for.  Under ``torchrun`` or SLURM the
    processes that are there are taken, whatever this says.
    """
    launcher: Launcher = "local"
    """Who starts them: this command, on this machine, or a Ray cluster (``pip install
    isobit[ray]``).
    """
    restarts: int = Field(default=0, ge=0, le=MAX_COUNT)
    """After the death of a process all are started again with ``--resume``, at most so often; on a
    Ray cluster on the nodes that are left, and in fewer processes where these have no room for all.
    """
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy that one GPU cannot hold: each has a part of
    every linear's outputs, and the bits are those of one.  ``isobit eval`` takes it; in a run
    published weights are whole on every GPU.
    """
    rollouters: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """Processes, the last of them, that only sample, while the others train; 0 lets all do both in
    turn.  It takes ``async.lag`` of at least 1 to keep both busy.
    """

    @property
    def is_launched(self) -> bool:
        """Whether the command starts others and computes nothing itself."""
        return self.processes > 1 or self.launcher == "ray"
