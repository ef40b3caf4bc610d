"""The table ``evaluation``: when the policy is measured, and how it answers then."""

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_BATCH, MAX_FACTOR, MAX_STEPS
from isobit.config.shape import MAX_POSITIONS


class EvaluationConfig(Strict):
    """Periodic evaluation on every set of ``data.eval``; also before the first and after the last
    step.
    """

    every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between evaluations; 0 is only before and after."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """0 is greedy, one sample a problem."""
    samples: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Samples a problem when the temperature is above 0: gives mean@n and pass@k."""
    max_new_tokens: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """By default as in ``rollout``."""
