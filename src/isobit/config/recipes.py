"""The recipes of ``isobit train`` and ``isobit sft``, and the settings of the other commands."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from isobit.config.algorithm import AlgorithmConfig, Correction, GrpoConfig
from isobit.config.base import MAX_COUNT, MAX_THREADS, Device, HomeName, HomePath, Seed, Strict
from isobit.config.data import (
    ChatConfig,
    DataConfig,
    EnvironmentConfig,
    OneExampleSource,
    RewardConfig,
    SftDataConfig,
)
from isobit.config.tables import (
    AsyncConfig,
    CheckConfig,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EvaluationConfig,
    LoraConfig,
    ModelShape,
    OptimisationConfig,
    PrecisionConfig,
    ReferenceConfig,
    ReplayConfig,
    RolloutConfig,
    RunRolloutConfig,
    TrackingConfig,
    TrainingConfig,
)
from isobit.util.errors import ConfigError


class ServeConfig(Strict):
    """The settings of ``isobit serve``."""

    data: ChatConfig = ChatConfig()
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    rollout: RolloutConfig = RolloutConfig()
    cluster: EngineConfig = EngineConfig()


class GenerationConfig(ServeConfig):
    """The settings of ``isobit rollout``."""

    environment: EnvironmentConfig | None = None
    """Tools that the model calls."""


class VerifyConfig(Strict):
    """The settings of ``isobit verify``, which chooses its own rollouts."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    cluster: EngineConfig = EngineConfig()


class ExportConfig(Strict):
    precision: PrecisionConfig | None = None
    """By default the run's own."""


class InspectConfig(Strict):
    """The settings of ``isobit inspect``; those of rollout and training count with ``--gpu``."""

    precision: PrecisionConfig = PrecisionConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()


class ScoringConfig(ChatConfig):
    """The settings of ``isobit eval --reward-model``."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    data: OneExampleSource
    tokens_per_batch: int = Field(default=16384, gt=0, le=MAX_COUNT)
    """Tokens of one forward; scores do not depend on it."""


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
    """``auto`` takes a Hopper GPU where one is there that computes the model."""
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
        """What another engine samples is corrected unless the recipe says otherwise."""
        if not isinstance(values, Mapping) or "corrections" in values:
            return values
        rollout = values.get("rollout")
        engine = rollout.get("engine") if isinstance(rollout, Mapping) else None
        is_other = engine not in (None, "native") or (
            isinstance(rollout, RunRolloutConfig) and rollout.engine != "native"
        )
        return {**values, "corrections": [{"type": "tis"}]} if is_other else values


Objective = Literal["supervised", "preference"]


class SftConfig(Strict):
    objective: Objective = "supervised"
    """``supervised`` trains on completions; ``preference`` trains a reward model on pairs."""
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
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where one is there that computes the model."""
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice. Gradients repeat bit for bit at a fixed number."""
    data: SftDataConfig
    training: OptimisationConfig = OptimisationConfig()
    """A step trains on ``prompts_per_step`` prompts with their completions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the held-out sets are evaluated, and how completions for a reward are sampled."""
    reward: RewardConfig | None = None
    """With a reward, an evaluation also completes the held-out prompts and grades them."""
    rollout: RolloutConfig = RolloutConfig()
    """How they are completed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


Recipe = RunConfig | SftConfig


def check_lora(config: Recipe) -> None:
    """Refuse what adapters do not go with, by the key."""
    if config.lora is None:
        return
    if config.precision.wgrad is not None:
        raise ConfigError(
            f"precision.wgrad is {config.precision.wgrad!r}, but with [lora] no matrix of the "
            "model has a gradient, and WGrad of adapters is in BF16; leave it out"
        )
    if isinstance(config, SftConfig):
        if config.objective == "preference":
            raise ConfigError(
                'lora is set, and objective is "preference": a reward model has a score head that '
                "adapters' files do not hold; leave [lora] out"
            )
        return
    calibrated = getattr(config.algorithm, "calibrate_every", 0)
    for key, value, reason in (
        ("rollout.engine", config.rollout.engine, "adapters are published to the native engine"),
        ("reference.refresh_every", config.reference.refresh_every, "the reference is the base"),
        ("reference.offload", config.reference.offload, "the reference is the policy's own base"),
        ("algorithm.calibrate_every", calibrated, "a BF16 shadow is made of masters"),
    ):
        if value and value != "native":
            raise ConfigError(
                f"{key} is {value!r} and lora is set, but {reason}; leave one of them out"
            )
