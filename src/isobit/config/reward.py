"""The table ``reward``: who grades completions, and how many gradings may fail."""

from pydantic import Field

from isobit.config.base import Strict


class RewardConfig(Strict):
    """How completions are graded."""

    function: str = "reasoning_gym"
    """``module:function``, ``path/to/file.py:function``, or ``reasoning_gym`` for the task's own
    scorer.
    """
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's rewards raised or was not finite; below it they
    are excluded and counted.
    """
