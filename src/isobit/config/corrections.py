"""The list ``corrections``: weights for tokens sampled by another policy than the trained one.

The weights of several corrections are multiplied; ``docs/algorithms.md`` has the formulas.
"""

from typing import Annotated, Literal

from pydantic import Field

from isobit.config.base import MAX_FACTOR, Strict


class TisCorrection(Strict):
    """Truncated importance sampling: min(rho, max)."""

    type: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Each token's rho, or the product over its sequence."""
    max: float = Field(default=2.0, ge=1, le=MAX_FACTOR)
    min: float = Field(default=0.0, ge=0, le=1)
    """Smaller ratios count as this."""


class MisCorrection(Strict):
    """Masked importance sampling: what lies outside [min, max] gets weight 0.

    token and sequence: rho inside the bounds. geometric: 1 for every token of a sequence whose
    geometric mean of rho is inside.
    """

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence", "geometric"] = "token"
    """Each token's rho, the product over its sequence, or the geometric mean over it."""
    max: float | None = Field(default=None, ge=1, le=MAX_FACTOR)
    """The largest rho that counts; by default 2, and 1.001 for the geometric mean."""
    min: float | None = Field(default=None, ge=0, le=1)
    """The smallest rho that counts; by default 0, and 0.99 for the geometric mean."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest rho that counts."""
        low, high = (0.99, 1.001) if self.level == "geometric" else (0.0, 2.0)
        return low if self.min is None else self.min, high if self.max is None else self.max


class IcePopCorrection(Strict):
    """IcePop: rho of a token where it lies in [min, max], else 0."""

    type: Literal["icepop"] = "icepop"
    max: float = Field(default=5.0, ge=1, le=MAX_FACTOR)
    min: float = Field(default=0.5, ge=0, le=1)


class K3Correction(Strict):
    """Rejection: weight 0 where the K3 divergence of a token or sequence is above ``max``."""

    type: Literal["k3"] = "k3"
    level: Literal["token", "sequence"] = "sequence"
    max: float = Field(default=0.01, gt=0, le=MAX_FACTOR)
    """Nats."""


class NormaliseCorrection(Strict):
    """Scale the weights to a mean of 1 over the batch: over its sequences where every correction is
    of whole sequences, else over its tokens. It must be the last correction.
    """

    type: Literal["normalise"] = "normalise"


Correction = Annotated[
    TisCorrection | MisCorrection | IcePopCorrection | K3Correction | NormaliseCorrection,
    Field(discriminator="type"),
]
