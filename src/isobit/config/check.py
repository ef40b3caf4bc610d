"""The table ``check``: what a run does where rollout and training are found to differ, and where
its rewards have nothing to teach.
"""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_FACTOR, MAX_STEPS


class CheckConfig(Strict):
    """What a run does in a step where rollout and training part (every response token has a
    log-probability from both), and after steps without a signal.
    """

    on_mismatch: Literal["warn", "stop", "ignore"] = "warn"
    """warn: a line on the console, once a step; stop: end the run; the metrics count differing
    tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Nats.  In an exact flow one differing token is a mismatch; in the others a mean absolute
    difference above this, if it is set.
    """
    max_ratio: float | None = Field(default=100.0, gt=1, le=MAX_FACTOR)
    """The largest probability ratio of trainer and sampler, in either direction, that a step may
    have without being told of as ``on_mismatch`` says; sampled by weights that are long gone, or by
    another program, tokens can be far out.
    """
    repeat_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Every so many steps one micro-batch's forward and backward are computed twice and their bits
    compared: an alarm for a processor, memory or kernel that errs now and then.  0: never.
    """
    state: bool = True
    """Whether weights, masters and moments are read again before a step learns, and compared with
    what the last update left: an alarm for a memory that loses bits.
    """
    on_no_signal: Literal["warn", "stop", "ignore"] = "warn"
    """Where ``no_signal_steps`` steps in a row had nothing to learn from, since all rewards of each
    prompt were equal.  warn: a line on the console, and one after each further so many; stop: end
    the run with a checkpoint; the metrics count such updates in any case.
    """
    no_signal_steps: int = Field(default=10, gt=0, le=MAX_STEPS)
