"""The recipes of ``isobit train`` and ``isobit sft``."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from isobit.config.algorithm import AlgorithmConfig, GrpoConfig, ReferenceConfig, ReplayConfig
from isobit.config.base import MAX_THREADS, BackEnd, Device, HomeName, HomePath, Seed, Strict
from isobit.config.corrections import Correction
from isobit.config.data import DataConfig, SftDataConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.keys import with_defaults
from isobit.config.lora import LoraConfig
from isobit.config.model_shape import ModelShape
from isobit.config.precision import PrecisionConfig, recorded_precision
from isobit.config.reward import DEFAULT_FUNCTION, RewardConfig
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.config.tables import (
    AsyncConfig,
    CheckConfig,
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    TrackingConfig,
)
from isobit.config.teacher import RunTeacher, SftTeacher
from isobit.config.training import OptimisationConfig, TrainingConfig


class RunConfig(Strict):
    model: HomeName = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit.
    """
    output: HomePath
    """The run's directory; it must be new or empty, or with ``--resume`` the run to continue."""
    lora: LoraConfig | None = None
    """Train adapters of low rank instead of the weights."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes an NVIDIA GPU where one is there that computes the model."""
    back_end: BackEnd = "auto"
    """The kernels of NVIDIA GPUs: ``hopper``, or ``triton`` for every card since Ampere; ``auto``
    takes the former on Hopper. A run's bits belong to the back end, and to the card's generation.
    """
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice. Gradients repeat bit for bit at a fixed number."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    """Tools that the model calls."""
    rollout: RunRolloutConfig = RunRolloutConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    corrections: tuple[Correction, ...] = ()
    """Weights, which are multiplied, for tokens that another policy sampled than the trained one.
    """
    reference: ReferenceConfig = ReferenceConfig()
    teacher: RunTeacher | None = None
    """A teacher to distil from."""
    replay: ReplayConfig = ReplayConfig()
    training: TrainingConfig = TrainingConfig()
    asynchrony: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    evaluation: EvaluationConfig = EvaluationConfig()
    check: CheckConfig = CheckConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _corrected_by_default(cls, values: Any) -> Any:
        """Default to truncated importance sampling for the engine vllm."""
        if not isinstance(values, Mapping) or "corrections" in values:
            return values
        rollout = values.get("rollout")
        engine = rollout.get("engine") if isinstance(rollout, Mapping) else None
        if isinstance(rollout, RunRolloutConfig):
            engine = rollout.engine
        return {**values, "corrections": [{"type": "tis"}]} if engine == "vllm" else values

    @model_validator(mode="before")
    @classmethod
    def _ungraded_by_default(cls, values: Any) -> Any:
        """Default to no reward with ``teacher.only``, unless a task has its own scorer."""
        if not isinstance(values, Mapping) or "reward" in values:
            return values
        teacher = values.get("teacher")
        only = teacher.get("only") if isinstance(teacher, Mapping) else getattr(teacher, "only", 0)
        is_graded = not only or _has_task(values.get("data"))
        return values if is_graded else {**values, "reward": {"function": "none"}}


def _has_task(data: Any) -> bool:
    """Whether a source of data is a reasoning-gym task, which has its own scorer."""
    if isinstance(data, BaseModel):
        data = data.model_dump()
    if not isinstance(data, Mapping):
        return False
    return data.get("type") == DEFAULT_FUNCTION or any(map(_has_task, data.values()))


Objective = Literal["supervised", "preference", "distil"]


class SftConfig(Strict):
    objective: Objective = "supervised"
    """``supervised`` trains on completions; ``preference`` trains a reward model on pairs;
    ``distil`` learns a teacher's distribution of each completion token.
    """
    model: HomeName = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit. For the objective ``preference`` it may be
    a reward model; a language model gets a score head in place of lm_head.
    """
    from_scratch: ModelShape | None = None
    """Start from random weights of this shape; only the tokenizer is taken from ``model``."""
    output: HomePath
    """The run's directory; it must be new or empty, or with ``--resume`` the run to continue."""
    lora: LoraConfig | None = None
    """Train adapters of low rank instead of the weights."""
    teacher: SftTeacher | None = None
    """The teacher of the objective ``distil``; by default the run's ``model`` in BF16."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes an NVIDIA GPU where one is there that computes the model."""
    back_end: BackEnd = "auto"
    """The kernels of NVIDIA GPUs: ``hopper``, or ``triton`` for every card since Ampere; ``auto``
    takes the former on Hopper. A run's bits belong to the back end, and to the card's generation.
    """
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice. Gradients repeat bit for bit at a fixed number."""
    data: SftDataConfig
    training: OptimisationConfig = OptimisationConfig()
    """A step trains on ``prompts_per_step`` prompts with their completions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The steps at which the held-out sets are evaluated, and the sampling of completions for a
    reward.
    """
    reward: RewardConfig | None = None
    """A reward: with it an evaluation also completes the held-out prompts and grades them."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of the completions of held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


Recipe = RunConfig | SftConfig
RECIPES: dict[str, type[RunConfig] | type[SftConfig]] = {"train": RunConfig, "sft": SftConfig}
"""The commands that take a recipe, and its model."""


def recorded_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe that a run or a checkpoint recorded, with what its precision stood for then, and
    the only back ends that there were before they had a key.
    """
    values = {"back_end": "auto", **values}
    table = values.get("precision")
    if not isinstance(table, Mapping) or "preset" not in table:
        return values
    return {**values, "precision": recorded_precision(table)}


def completed_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a value for every key: where the version that recorded it had none, the default
    of today, which is what that version did. A key whose default is not needs a line in
    ``recorded_recipe``.
    """
    values = recorded_recipe(values)
    return with_defaults(RunConfig if "algorithm" in values else SftConfig, values)
