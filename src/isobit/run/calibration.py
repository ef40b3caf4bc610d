"""The calibrated clip of a recipe: whether there is one, and what its BF16 shadow takes."""

from isobit.algorithms.clipped import ClippedPolicyGradient
from isobit.algorithms.objective import Algorithm
from isobit.config.algorithm import TokenClipConfig
from isobit.config.run import RunConfig
from isobit.memory.frozen import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.frozen import without_value_head
from isobit.precision.flow import build_flow
from isobit.training.calibration import SHADOW, Calibration
from isobit.training.trainer import Trainer


def calibrates(config: RunConfig) -> bool:
    """Whether the clip's bounds are ever set anew."""
    algorithm = config.algorithm
    return isinstance(algorithm, TokenClipConfig) and algorithm.calibrate_every > 0


def describe_shadow(config: RunConfig, policy: ModelConfig) -> FrozenModel | None:
    """The shadow as a plan of the memory knows it; None where there is none."""
    if not calibrates(config):
        return None
    shape = without_value_head(policy)
    flow = build_flow(SHADOW, decoder_shape(shape))
    return FrozenModel("BF16 shadow", shape, flow, "algorithm", lasting=False)


def build_calibration(
    config: RunConfig, algorithm: Algorithm, trainer: Trainer
) -> Calibration | None:
    """What sets the bounds of ``algorithm``, which is the recipe's; None where nothing does."""
    if not calibrates(config):
        return None
    assert isinstance(algorithm, ClippedPolicyGradient), "its configuration has the key"
    return Calibration(trainer, algorithm)
