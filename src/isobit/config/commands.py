"""What commands without a recipe take of a run's settings."""

from pydantic import Field

from isobit.config.base import Device, Strict
from isobit.config.cluster import EngineConfig
from isobit.config.examples import ExampleSource
from isobit.config.limits import MAX_COUNT
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig


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
