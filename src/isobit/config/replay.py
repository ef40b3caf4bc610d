"""The table ``replay``: completions of earlier steps that are learnt from again."""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_COUNT


class ReplayConfig(Strict):
    """Experience replay.  Off as long as ``fraction`` is 0."""

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each step's batch that is replayed; a step's own completions are the rest."""
    max_staleness: int = Field(default=4, gt=0, le=MAX_COUNT)
    """Updates of the weights since a completion was sampled, after which it is dropped."""
    max_mib: float = Field(default=256.0, gt=0, le=MAX_COUNT)
    """What the buffer holds at most, in MiB; the oldest go first."""
    sampling: Literal["uniform", "advantage"] = "uniform"
    """Every completion alike, or in proportion to the size of its advantage: those of level groups
    then never come again.
    """
