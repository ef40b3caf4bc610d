"""The settings of the commands that take no recipe."""

from pydantic import Field

from isobit.config.base import MAX_COUNT, BackEnd, Device, Strict
from isobit.config.data import ChatConfig, OneExampleSource
from isobit.config.environment import EnvironmentConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.tables import EngineConfig
from isobit.config.training import TrainingConfig


class ServeConfig(Strict):
    """The settings of ``isobit serve``."""

    data: ChatConfig = ChatConfig()
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    back_end: BackEnd = "auto"
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
    back_end: BackEnd = "auto"
    cluster: EngineConfig = EngineConfig()


class ExportConfig(Strict):
    precision: PrecisionConfig | None = None
    """The flow to write; by default the run's own."""


class InspectConfig(Strict):
    """The settings of ``isobit inspect``; those of rollout and training count with ``--gpu``."""

    precision: PrecisionConfig = PrecisionConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()


class ScoringConfig(ChatConfig):
    """The settings of ``isobit eval --reward-model``."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    back_end: BackEnd = "auto"
    data: OneExampleSource
    tokens_per_batch: int = Field(default=16384, gt=0, le=MAX_COUNT)
    """Tokens of one forward; scores do not depend on it."""
