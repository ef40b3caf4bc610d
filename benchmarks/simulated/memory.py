"""What a GPU of many holds, and what that leaves: the level of recomputation, places for samples.

masters, moments    of the rows that a rank owns: 1 / W
gradients           their sum, also of those rows; with a slot a host of the rows that the rank
                    has of its host's sum: 1 / 8
buffers             of two layers to send and two to receive, FP32
published weights   whole
"""

from dataclasses import dataclass
from math import prod
from typing import get_args

from benchmarks.simulated import measured
from benchmarks.simulated.model import GIB, Model
from benchmarks.simulated.rollout import LONGEST, MEAN, PROMPT
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.memory.cache_size import RESERVE, forward_bytes

MICROBATCH = 16_384
_SEQUENCES = 256
_LEVELS: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Room:
    """Of one GPU among W, GiB."""

    resident: float
    """Of training, before activations."""
    training: float
    """At its peak, with the reserve."""
    recompute: Recompute | None
    """The cheapest that fits; None where none does."""
    places: int
    """For samples of mean length, at most 256."""

    @property
    def fits(self) -> bool:
        """Whether a run can have it."""
        return self.recompute is not None and self.places >= 8


def room(model: Model, gpus: int, slots: int) -> Room:
    """For micro-batches of ``MICROBATCH`` tokens and BF16 moments."""
    planner, total = model.planner, int(measured.MEMORY_GIB * GIB)
    weights = planner.weight_bytes(_training("none"))
    owners = min(gpus, measured.GPUS_A_HOST) if slots > 1 else gpus
    buffers = 4 * largest_layer(model) * 4 if gpus > 1 else 0
    standing = (
        weights["published weights"] + (weights["masters"] + weights["optimiser moments"]) / gpus
    )
    resident = standing + weights["masters"] / owners + buffers
    peaks = {level: resident + RESERVE + _activations(model, level) for level in _LEVELS}
    fitting: list[Recompute] = [level for level in _LEVELS if peaks[level] <= total]
    level: Recompute | None = fitting[0] if fitting else None
    forward = forward_bytes(model.config, planner.flow, RolloutConfig(), planner.sizes)
    left = total - standing - RESERVE - forward
    places = int(max(left, 0) / (model.kv_bytes * (PROMPT + MEAN)))
    return Room(
        resident / GIB, peaks[level or _LEVELS[-1]] / GIB, level, min(places // 8 * 8, _SEQUENCES)
    )


def largest_layer(model: Model) -> int:
    """Parameters of a layer, which the exchange's buffers are cut for."""
    return sum(prod(shape) for name, shape in model.shapes.items() if name.startswith("layers.0."))


def _activations(model: Model, recompute: Recompute) -> int:
    parts = model.planner.training_bytes(_training(recompute), MICROBATCH, PROMPT + LONGEST)
    weights = ("masters", "published weights", "optimiser moments", "gradients")
    return sum(size for name, size in parts.items() if name not in weights)


def _training(recompute: Recompute) -> TrainingConfig:
    return TrainingConfig(moments="bf16", recompute=recompute, tokens_per_microbatch=MICROBATCH)
