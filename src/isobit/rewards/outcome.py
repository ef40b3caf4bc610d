"""What grading one completion came to: a finite number, or a failure with its kind.

A reward's own answer may be a number of Python, numpy or torch, or, as verl's functions give it, a
dict whose ``score`` is the number; its other entries are dropped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from isobit.rewards.secrets import hidden

LARGEST = 1e18
"""A reward may be: sums of squares of such numbers are still numbers of FP32."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that is no usable number."""

    kind: str
    """The exception's name, ``not finite``, ``too large``, ``not a number``, ``no reward``,
    ``deadline`` or ``crash``.
    """
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", hidden(self.message))


Outcome: TypeAlias = float | Failure


def failure_of(error: BaseException) -> Failure:
    """What a reward raised, cut to a length that can be shown."""
    kind = type(error).__name__[:100]
    try:
        message = f"{kind}: {error}"
    except Exception as another:  # of the exception's own method
        message = f"{kind}, whose text raises {type(another).__name__:.100}"
    return Failure(kind, message[:2000])


def outcome_of(value: Any) -> Outcome:
    """What a reward returned for one completion: Python's and numpy's integers, floats and booleans
    are numbers, and so is a tensor of no dimension; anything else is a failure, and so is what
    raises when it is asked for its number.
    """
    try:
        return _number_or_failure(value)
    except Exception as error:  # a tensor without data, an object with methods of its own
        return failure_of(error)


def _number_or_failure(value: Any) -> Outcome:
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(repr, value)) or "nothing"
            return Failure(
                "not a number", f"the reward returned a dict with {keys:.200}, expected 'score'"
            )
        value = value["score"]
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        return Failure(
            "not a number",
            f"the reward returned {type(value).__name__} {value!r:.80}, expected a number",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Failure("not finite", f"the reward returned {number}, expected a finite number")
    if abs(number) > LARGEST:
        return Failure(
            "too large", f"the reward returned {number}, expected at most {LARGEST:g} in magnitude"
        )
    return number
