"""The check of every step: whether rollout and training still are one function, as the ``[check]``
table asks.

It costs nothing, since both log-probabilities of every response token exist: the one recorded while
sampling and the trainer's. In an exact flow one differing token is one too many.  In the others,
whose sides are two functions, what counts is the mean absolute difference.
"""

from pathlib import Path

from isobit.config.check import CheckConfig
from isobit.errors import MismatchError
from isobit.parallel.agreement import agreed
from isobit.precision.flow import PrecisionFlow
from isobit.training.comparison import Comparison


def check_step(
    check: CheckConfig, flow: PrecisionFlow, comparison: Comparison, model: Path
) -> list[str]:
    """What to print about a step: nothing, or one line where the sides part; ``model`` is the
    folder of the run's weights.

    Raises MismatchError instead where the run is to stop; every rank does.
    """
    problem = _problem(check, flow, comparison)
    if problem is None or check.on_mismatch == "ignore":
        return []
    advice = f"isobit verify {model} --precision {flow.preset} --bisect"
    if check.on_mismatch == "warn":
        return [f"{problem}; find out where with: {advice}"]
    raise agreed(
        MismatchError(
            f'{problem}; check.on_mismatch is "stop". Run `{advice}`, which names the first layer '
            "and operation that differ, "
            'or set check.on_mismatch = "warn" to go on'
        )
    )


def _problem(check: CheckConfig, flow: PrecisionFlow, comparison: Comparison) -> str | None:
    if flow.exact:
        if not comparison.differs:
            return None
        return (
            f"{comparison.tokens_differing:,} of {comparison.tokens_compared:,} log-probabilities"
            f"{comparison.describe_routings()} differ between rollout and training, "
            f"by {comparison.max_abs_diff:.3g} at most, in a flow where none should"
        )
    limit = check.max_mean_diff
    if limit is None or comparison.mean_abs_diff <= limit:
        return None
    return (
        f"log-probabilities of rollout and training differ by {comparison.mean_abs_diff:.3g} nats "
        "on average, "
        f"more than check.max_mean_diff = {limit:g}"
    )
