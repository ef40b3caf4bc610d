"""What commands without a recipe take of a run's settings."""

from isobit.config.base import Device, Strict
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig


class GenerationConfig(Strict):
    """What ``isobit rollout`` takes of a run's settings."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    rollout: RolloutConfig = RolloutConfig()


class VerifyConfig(Strict):
    """What ``isobit verify`` takes of a run's settings: the check chooses its own rollouts."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
