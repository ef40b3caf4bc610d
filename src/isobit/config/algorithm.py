"""The table ``algorithm``: what reinforcement learning optimises."""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict


class AlgorithmConfig(Strict):
    """The objective.  The family grows here; GRPO's switches cover clip-higher, Dr. GRPO's
    normalisation and both means.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    """Above ``clip_low`` is DAPO's clip-higher."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all response tokens of an update, or over sequences of each one's mean."""
    normalise_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); false is Dr. GRPO."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a KL penalty to a reference model; not available yet: anything but 0 is refused."""
