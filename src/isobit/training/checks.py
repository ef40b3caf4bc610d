"""The ``[check]`` of every step of a run: whether rollout and training are still one function.

check_step    the log-probabilities of a step, recorded while sampling and computed in training.
              Both exist anyway, so the check costs nothing.  It is made before the step's first
              update, so that a run which stops has not learnt from what it found.  In an exact
              flow, one differing token is a mismatch.  In the others, whose sides are two
              functions, the limit is on the mean absolute difference.  In all of them, a
              probability ratio beyond ``max_ratio`` is reported: such tokens were sampled by much
              older weights.  A micro-batch that was computed twice (``isobit.training.repeat``)
              must have the same bits again, which needs neither a limit nor an exact flow
check_state   weights and optimiser state between two updates, against what the first of them
              left.  Both sides would use a bit that the memory has lost there, so no
              log-probability shows it
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from isobit.config.tables import CheckConfig, OnMismatch
from isobit.parallel.world import raised_on_all
from isobit.precision.flow import PrecisionFlow
from isobit.store.state import StateDigest
from isobit.training.comparison import Comparison
from isobit.training.repeat import FORWARD, Repeat
from isobit.training.step import Findings
from isobit.util.errors import MismatchError


def action_of(check: CheckConfig, exact: bool) -> OnMismatch:
    """What ``check.on_mismatch`` asks for in a flow that is ``exact``, or is not."""
    if check.on_mismatch != "auto":
        return check.on_mismatch
    return "stop" if exact else "warn"


def check_step(
    check: CheckConfig,
    flow: PrecisionFlow,
    found: Findings,
    model: Path,
    one_function: bool = True,
) -> list[str]:
    """Lines to print about what a step has found so far, one for each problem; ``model`` is the
    folder of the run's weights, and ``one_function`` is False where another engine samples.

    Raises MismatchError instead, on every rank, where the run is to stop (``action_of``).
    """
    exact = flow.exact and one_function
    action, lines = action_of(check, exact), list[str]()
    if action == "ignore":
        return lines
    if found.repeat is not None and found.repeat.differing:
        lines.append(_told(action, check, _describe_repeat(found.repeat), _REPLACE))
    bisect = f"isobit verify {model} --precision {shlex.quote(flow.name)} --bisect"
    if problem := _parting(check, exact, found.comparison):
        advice = f"find out where with: {bisect}" if one_function else _STALE
        if exact:
            advice += (
                "; where that finds nothing, the tokens were sampled by other weights, or the "
                "fault did not come again: set check.repeat_every"
            )
        lines.append(_told(action, check, problem, advice))
    if ratio := _far_out(check, found.mismatch):
        lines.append(_told(action, check, ratio, _STALE))
    return lines


def check_state(
    check: CheckConfig, left: StateDigest, stands: StateDigest, exact: bool
) -> list[str]:
    """A line to print if the state is not what the last update ``left``, in a flow that is
    ``exact`` or is not.  Raises MismatchError as ``check_step`` does.
    """
    now, action = asdict(stands), action_of(check, exact)
    changed = [name for name, digest in asdict(left).items() if now[name] != digest]
    if not changed or action == "ignore":
        return []
    problem = f"{' and '.join(changed)} in memory are not what the last update left"
    return [_told(action, check, problem, _MEMORY)]


def check_noise(check: CheckConfig, problem: str | None) -> list[str]:
    """A line to print about samples of an exact flow that were drawn again and are others.  Raises
    MismatchError as ``check_step`` does.
    """
    action = action_of(check, exact=True)
    return [] if problem is None or action == "ignore" else [_told(action, check, problem, _NOISE)]


_NOISE = (
    "a server takes noise of other samples, or samples otherwise than the run asks: compare "
    "`isobit --version` on all machines, and take out of rollout.servers what is not known"
)


_MEMORY = (
    "a memory has lost bits, or something else writes there: run `isobit doctor` here, and go on "
    "from the last checkpoint (--resume), on another machine if it comes again"
)


_REPLACE = (
    "run `isobit doctor` here; if it passes, suspect the processor or the memory, and go on on "
    "another machine from a checkpoint before this step"
)


_STALE = (
    "such tokens were drawn from other weights, or by another function: look at staleness/mean and "
    "mismatch/..; corrections (docs/algorithms.md) bound what they weigh"
)


def _told(action: OnMismatch, check: CheckConfig, problem: str, advice: str) -> str:
    """The line on a problem; raises MismatchError where the run is to stop."""
    if action == "warn":
        return f"{problem}; {advice}"
    by_default = ", as by default in an exact flow" if check.on_mismatch == "auto" else ""
    raise raised_on_all(
        MismatchError(
            f'{problem}; check.on_mismatch is "stop"{by_default}. '
            f'{advice[0].upper()}{advice[1:]}; or set check.on_mismatch = "warn" to go on'
        )
    )


def _describe_repeat(repeat: Repeat) -> str:
    gradients = [name for name in repeat.differing if name != FORWARD]
    parts = ["its forward"] if FORWARD in repeat.differing else []
    if gradients:
        parts.append(f"{len(gradients)} of {repeat.gradients} gradients, {gradients[0]} first")
    return f"a micro-batch computed twice gave other bits the second time: {' and '.join(parts)}"


def _far_out(check: CheckConfig, mismatch: Mapping[str, float]) -> str | None:
    if not mismatch or check.max_ratio is None:
        return None
    low, high = mismatch["mismatch/ratio_min"], mismatch["mismatch/ratio_max"]
    if high <= check.max_ratio and low * check.max_ratio >= 1:
        return None
    return (
        f"probability ratios of trainer and sampler reach from {low:.3g} to {high:.3g}, beyond "
        f"check.max_ratio = {check.max_ratio:g}"
    )


def _parting(check: CheckConfig, exact: bool, comparison: Comparison) -> str | None:
    if exact:
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
