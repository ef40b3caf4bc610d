"""What commands without a recipe take of a run's settings.

The recipe of ``isobit train``: its tables, and the keys of none.

The recipe of ``isobit sft``: its tables, which are those of ``isobit train`` where the two
agree.

What a training is configured by: one recipe for each kind of it.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from isobit.config.algorithm import AlgorithmConfig, Correction, GrpoConfig
from isobit.config.base import MAX_COUNT, MAX_THREADS, Device, Seed, Strict
from isobit.config.data import DataConfig, ExampleSource, SftDataConfig
from isobit.config.reward import RewardConfig
from isobit.config.tables import (
    AsyncConfig,
    CheckConfig,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EvaluationConfig,
    ModelShape,
    OptimisationConfig,
    PrecisionConfig,
    ReferenceConfig,
    ReplayConfig,
    RolloutConfig,
    TrackingConfig,
    TrainingConfig,
)


class GenerationConfig(Strict):
    """What ``isobit rollout`` takes of a run's settings."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    rollout: RolloutConfig = RolloutConfig()
    cluster: EngineConfig = EngineConfig()


class VerifyConfig(Strict):
    """What ``isobit verify`` takes of a run's settings: the check chooses its own rollouts."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    cluster: EngineConfig = EngineConfig()


class ExportConfig(Strict):
    """What ``isobit export`` takes of a run's settings."""

    precision: PrecisionConfig | None = None
    """By default the run's own."""


class InspectConfig(Strict):
    """What ``isobit inspect`` takes of a run's settings."""

    precision: PrecisionConfig = PrecisionConfig()


class ScoringConfig(Strict):
    """What ``isobit eval --reward-model`` takes of a run's settings."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    data: ExampleSource
    chat: bool = True
    tokens_per_batch: int = Field(default=16384, gt=0, le=MAX_COUNT)
    """Tokens of a forward; a longer conversation is one of its own.  No score depends on it."""


class RunConfig(Strict):
    """One training run."""

    model: str = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit.
    """
    output: Path
    """The run's directory; it must be new or empty, or with ``--resume`` the one to go on in."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where there is one that computes the model."""
    seed: Seed = 0
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice.  Gradients repeat bit for bit at a fixed number."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    corrections: tuple[Correction, ...] = ()
    """For tokens that another policy drew than the trainer's: their weights are multiplied."""
    reference: ReferenceConfig = ReferenceConfig()
    replay: ReplayConfig = ReplayConfig()
    training: TrainingConfig = TrainingConfig()
    asynchrony: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    evaluation: EvaluationConfig = EvaluationConfig()
    check: CheckConfig = CheckConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


Objective = Literal["supervised", "preference"]


class SftConfig(Strict):
    """One run of supervised fine-tuning."""

    objective: Objective = "supervised"
    """``supervised`` learns completions; ``preference`` makes a reward model, which learns from
    pairs of answers which of the two is preferred (Bradley-Terry).
    """
    model: str = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit.  With the objective ``preference`` it may
    be a reward model, which learns on; a language model gets a score head in the place of lm_head.
    """
    from_scratch: ModelShape | None = None
    """Start from random weights of this shape; ``model`` then gives its tokenizer and nothing
    else.
    """
    output: Path
    """The run's directory; it must be new or empty, or with ``--resume`` the one to go on in."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where there is one that computes the model."""
    seed: Seed = 0
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice.  Gradients repeat bit for bit at a fixed number."""
    data: SftDataConfig
    training: OptimisationConfig = OptimisationConfig()
    """A step learns from ``prompts_per_step`` prompts with their completions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the loss of every held-out set is measured, and how completions are drawn where a reward
    grades them.
    """
    reward: RewardConfig | None = None
    """With a reward, an evaluation also completes the held-out prompts and grades them."""
    rollout: RolloutConfig = RolloutConfig()
    """How they are completed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


Recipe = RunConfig | SftConfig
"""The whole configuration of a training."""
