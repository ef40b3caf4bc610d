"""The small tables of a run: ``async``, ``check``, ``checkpoint``, ``cluster``, ``evaluation`` and
``tracking``.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from isobit.config.base import (
    MAX_BATCH,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_PROCESSES,
    MAX_STEPS,
    MAX_WAIT_S,
    HomeName,
    Strict,
)
from isobit.config.model_shape import MAX_POSITIONS


class AsyncConfig(Strict):
    """How far sampling runs ahead of learning: by a fixed lag, or freely within a bound. Either run
    can be repeated to the last bit.
    """

    lag: int = Field(default=0, ge=0, le=64)
    """How many steps sampling runs ahead of training: batch t is sampled by the weights after step
    t - 1 - lag. Raise it to 1 to keep rollouters and trainers busy at once.
    """
    max_staleness: int | None = Field(default=None, ge=0, le=64)
    """Steps that a token may be older than the step that learns from it. A step learns from the
    first groups that are whole; half-done samples, and episodes of an environment, go on with the
    next weights. 0 is the synchronous run; by default ``lag`` says what is sampled when.
    """


OnMismatch = Literal["warn", "stop", "ignore"]
ON_MISMATCH = get_args(OnMismatch)
"""What a run can do about a mismatch."""


class CheckConfig(Strict):
    """What a run does about a mismatch of log-probabilities, and after steps without a signal."""

    on_mismatch: Literal["auto"] | OnMismatch = "auto"
    """The action on a mismatch of log-probabilities: stop ends the run before the update that would
    learn from them, warn prints a line once a step and goes on; auto stops in an exact flow and
    warns in others. The metrics count differing tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Nats. In an exact flow any differing token is a mismatch; in other flows a mean absolute
    difference above this is, if it is set.
    """
    max_ratio: float | None = Field(default=100.0, gt=1, le=MAX_FACTOR)
    """The largest probability ratio of trainer and sampler before ``on_mismatch`` applies."""
    repeat_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checks for faulty hardware, which compute one micro-batch twice; 0 is never."""
    state: bool = True
    """Verify before each step that weights, masters and moments are unchanged in memory."""
    on_no_signal: Literal["warn", "stop", "ignore"] = "warn"
    """The action after ``no_signal_steps`` steps in a row in which every group had zero variance:
    warn prints a line, stop ends the run with a checkpoint. The metrics count such updates in any
    case.
    """
    no_signal_steps: int = Field(default=10, gt=0, le=MAX_STEPS)
    """Steps in a row without a signal before ``on_no_signal`` applies."""


class CheckpointConfig(Strict):
    """Checkpoints of the whole state of a run in ``checkpoints/``: when one is written, and how
    many are kept. The last step, SIGTERM and Ctrl-C also write one.
    """

    every: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Steps between checkpoints; 0 writes one only when the run ends or is interrupted."""
    keep_last: int = Field(default=2, ge=0, le=MAX_STEPS)
    """How many of the newest are kept; 0 writes none at all, so that the run cannot be resumed."""
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Also keep checkpoints of multiples of this many steps (a multiple of ``every``); 0 is off."""
    wait_for_space_s: float = Field(default=600.0, ge=0, le=MAX_WAIT_S)
    """Seconds that a run waits when the disk or a quota is full; 0 ends the run at once."""
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this evaluation figure, for example
    ``eval/held_out/accuracy``; of ``isobit sft``'s ``eval/NAME/loss`` the lowest.
    """
    on_save: HomeName | tuple[HomeName, ...] | None = None
    """What is run after each complete checkpoint and model: a Python function by
    ``path/to/file.py:function`` or ``module:function``, which is given the folder's path, or a
    command as a list, in which ``{folder}`` is the path (by default it comes last). It is a process
    of its own, whose output is in ``on_save.log``; a failure is printed, and the run goes on.
    """
    on_save_limit_s: float = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """Seconds after which ``on_save`` is killed, which counts as a failure."""


Launcher = Literal["local", "ray"]


class EngineConfig(Strict):
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy too large for one GPU; no bit changes."""


class ClusterConfig(Strict):
    """The processes of a run. No key changes what the run computes."""

    processes: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """The number of GPUs, or at most that of CPU cores; ``torchrun`` and SLURM override it."""
    launcher: Launcher = "local"
    """What starts the processes: this command, or a Ray cluster (``pip install isobit[ray]``)."""
    restarts: int = Field(default=0, ge=0, le=MAX_COUNT)
    """How often all processes are restarted with ``--resume`` after one has died. A Ray cluster
    uses the remaining nodes, and fewer processes where they have no room for all.
    """
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine and its weights: of ``isobit eval`` all, of a run every so
    many.
    """
    rollouters: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """How many processes, the last ones, only sample while the others train; it needs ``async.lag``
    of at least 1 or ``async.max_staleness``. With 0 every process alternates between the two.
    """

    @property
    def is_launched(self) -> bool:
        """Whether the command starts other processes and computes nothing itself."""
        return self.processes > 1 or self.launcher == "ray"


class EvaluationConfig(Strict):
    """Evaluation on every set of ``data.eval``; also before the first and after the last step."""

    every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between evaluations; 0 evaluates only before and after the run."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """0 is greedy, with one sample of each prompt."""
    samples: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Samples of each prompt at a temperature above 0, for mean@n and pass@k."""
    max_new_tokens: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """Longest completion, in tokens; by default ``rollout.max_new_tokens``."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; by default
    ``rollout.top_p``.
    """


TrackerName = Literal["wandb", "mlflow", "trackio", "swanlab", "tensorboard"]


class TrackingConfig(Strict):
    """Services that get the figures and sample completions of a run as well, and how many of its
    completions are kept.
    """

    to: tuple[TrackerName, ...] = ()
    """Any of wandb, mlflow, trackio and swanlab, each with ``pip install`` of its name. TensorBoard
    events are always written; ``tensorboard`` adds the sample completions to them as text.
    """
    project: str = Field(default="isobit", min_length=1, max_length=128)
    """The project of a service, or MLflow's experiment."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """The run's name there; by default that of its directory."""
    tags: tuple[str, ...] = ()
    wandb: bool | str = False
    """The same as ``to = ["wandb"]``; a text is its project's name."""
    completions: Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["all"] = 0
    """How many completions of each step, and of each set of an evaluation, are written to the
    folder ``completions`` as Parquet: a number, or ``all``. The best and the worst of four groups
    are in ``completions.jsonl`` in any case.
    """

    @field_validator("to", mode="before")
    @classmethod
    def _of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def services(self) -> dict[TrackerName, str]:
        """The project by service."""
        projects: dict[TrackerName, str] = dict.fromkeys(self.to, self.project)
        if self.wandb is not False:
            projects["wandb"] = self.wandb if isinstance(self.wandb, str) else self.project
        return projects
