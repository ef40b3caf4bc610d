"""The table ``check``: what a run does where rollout and training are found to differ."""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_FACTOR


class CheckConfig(Strict):
    """What a run does in a step where rollout and training part: every response token has a
    log-probability from both.
    """

    on_mismatch: Literal["warn", "stop", "ignore"] = "warn"
    """warn: a line on the console, once a step; stop: end the run; the metrics count differing
    tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Nats.  In an exact flow one differing token is a mismatch; in the others a mean absolute
    difference above this, if it is set.
    """
