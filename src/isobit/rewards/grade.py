"""Grading a step: every completion gets a number or, if its reward failed, ``None``, which excludes
it from its group.

A failed reward is never a zero: a zero teaches the policy that the answer was wrong.  Failures are
counted by kind, the first message is kept, and too many of them stop the run.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from isobit.errors import RewardError
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.function import RewardFunction


@dataclass(frozen=True, slots=True)
class GradeStats:
    """How grading went: completions graded and failed, the failures by kind, and the first one's
    message.
    """

    graded: int
    failed: int
    failures: dict[str, int]
    """Counts by kind: the exception's name, ``not finite``, or ``not a number``."""
    first_error: str | None

    @property
    def failed_fraction(self) -> float:
        """Share of all completions whose reward failed."""
        return self.failed / max(1, self.graded + self.failed)

    def __add__(self, other: "GradeStats") -> "GradeStats":
        """Of two gradings together."""
        return GradeStats(
            self.graded + other.graded,
            self.failed + other.failed,
            dict(Counter(self.failures) + Counter(other.failures)),
            self.first_error or other.first_error,
        )


class _FailedError(Exception):
    """A reward that is no usable number: its kind and its message."""


def grade(
    groups: Sequence[Group], reward: RewardFunction, max_failed_fraction: float = 1.0
) -> GradeStats:
    """Fill ``group.rewards`` of every group, one entry a completion, in their order.

    Raises ``RewardError`` with the first error if a larger share than ``max_failed_fraction``
    failed, or all did.  A ``RewardError`` from the reward itself passes through: it says that no
    completion can be graded.
    """
    failures: Counter[str] = Counter()
    first_error: str | None = None
    for group in groups:
        group.rewards = []
        for index, completion in enumerate(group.completions):
            try:
                group.rewards.append(_score(reward, group.prompt, completion))
            except _FailedError as failure:
                kind, message = failure.args
                failures[kind] += 1
                first_error = first_error or f"prompt {group.prompt.id}, sample {index}: {message}"
                group.rewards.append(None)
    failed = failures.total()
    stats = GradeStats(
        sum(len(group.completions) for group in groups) - failed,
        failed,
        dict(failures),
        first_error,
    )
    if failed and (stats.graded == 0 or stats.failed_fraction > max_failed_fraction):
        raise RewardError(
            f"{failed} of {failed + stats.graded} rewards failed, more than the allowed share of "
            f"{max_failed_fraction:g} "
            f"(reward.max_failed_fraction); the first was {first_error}"
        )
    return stats


def _score(reward: RewardFunction, prompt: Prompt, completion: Completion) -> float:
    try:
        value = reward(prompt, completion)
    except RewardError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # a reward that calls sys.exit must not end the run unnoticed
        raise _FailedError(type(error).__name__, f"{type(error).__name__}: {error}") from error
    return _number(value)


def _number(value: Any) -> float:
    """``value`` as a float: Python's and numpy's integers, floats and booleans are numbers,
    anything else is a failure.
    """
    if not isinstance(value, Real | np.bool_):
        raise _FailedError(
            "not a number",
            f"the reward returned {type(value).__name__} {value!r:.80}, expected a number",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _FailedError("not finite", f"the reward returned {number}, expected a finite number")
    return number
