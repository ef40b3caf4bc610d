"""The recipe of ``isobit sft``: its tables, which are those of ``isobit train`` where the two
agree.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from isobit.config.base import Device, Seed, Strict
from isobit.config.checkpoint import CheckpointConfig
from isobit.config.cluster import ClusterConfig
from isobit.config.evaluation import EvaluationConfig
from isobit.config.examples import SftDataConfig
from isobit.config.limits import MAX_THREADS
from isobit.config.precision import PrecisionConfig
from isobit.config.reward import RewardConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.shape import ModelShape
from isobit.config.tracking import TrackingConfig
from isobit.config.training import OptimisationConfig

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
