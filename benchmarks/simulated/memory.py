"""What a GPU of many holds, and what that leaves: the level of recomputation, places for samples.

It is the plan of a run (``isobit.memory.device``) for W processes.  With a slot a host the eight of
a host share gradients, and their buffers, as eight processes do; masters and moments stay W's.
"""

from dataclasses import dataclass, replace
from typing import get_args

from benchmarks.simulated import measured
from benchmarks.simulated.model import GIB, Model
from benchmarks.simulated.rollout import LONGEST, MEAN, PROMPT
from isobit.config.tables import Recompute, RolloutConfig, TrainingConfig
from isobit.memory.cache_size import RESERVE, forward_bytes

MICROBATCH = 16_384
_SEQUENCES = 256
_OWNED = ("masters", "optimiser moments")
_LEVELS: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Room:
    """Of one GPU among W, GiB."""

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
    total = int(measured.MEMORY_GIB * GIB)
    together = gpus if slots == 1 else measured.GPUS_A_HOST
    planner = replace(model.planner, processes=together)
    standing = dict(planner.weight_bytes(_training("none")))
    for name in _OWNED:
        standing[name] = standing[name] * together // gpus

    def peak(level: Recompute) -> int:
        parts = planner.training_bytes(_training(level), MICROBATCH, PROMPT + LONGEST)
        return sum((dict(parts) | standing).values()) + RESERVE

    fitting: list[Recompute] = [level for level in _LEVELS if peak(level) <= total]
    level: Recompute | None = fitting[0] if fitting else None
    forward = forward_bytes(model.config, planner.flow, RolloutConfig(), planner.sizes)
    left = total - sum(standing.values()) - RESERVE - forward
    places = int(max(left, 0) / (model.kv_bytes * (PROMPT + MEAN)))
    return Room(peak(level or _LEVELS[-1]) / GIB, level, min(places // 8 * 8, _SEQUENCES))


def _training(recompute: Recompute) -> TrainingConfig:
    return TrainingConfig(moments="bf16", recompute=recompute, tokens_per_microbatch=MICROBATCH)
