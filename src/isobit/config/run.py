"""The recipe of ``isobit train``: its tables, and the keys of none."""

from pathlib import Path

from pydantic import Field

from isobit.config.algorithm import AlgorithmConfig, GrpoConfig
from isobit.config.asynchrony import AsyncConfig
from isobit.config.base import Device, Seed, Strict
from isobit.config.check import CheckConfig
from isobit.config.checkpoint import CheckpointConfig
from isobit.config.cluster import ClusterConfig
from isobit.config.correction import Correction
from isobit.config.data import DataConfig
from isobit.config.evaluation import EvaluationConfig
from isobit.config.limits import MAX_THREADS
from isobit.config.precision import PrecisionConfig
from isobit.config.reference import ReferenceConfig
from isobit.config.replay import ReplayConfig
from isobit.config.reward import RewardConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.tracking import TrackingConfig
from isobit.config.training import TrainingConfig


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
