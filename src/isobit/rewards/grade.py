"""The grade of one completion: a finite number, or a failure with its kind.

A reward may return a number of Python, numpy or torch, or, as in verl, a dict with the number as
``score``. None instead of the number says that the reward does not apply to the completion
(``NO_REWARD``): of several parts the others make its reward, and alone it is a failure.
"""

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

from isobit.util.errors import escaped, shown
from isobit.util.option_secrets import hidden

LARGEST = 1e18
"""The largest reward: sums of squares of such numbers are still finite in FP32."""
NO_REWARD = "no reward"
"""The kind of a reward that does not apply to a completion."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no number. Both texts may come from untrusted processes and are printed, so
    that unprintable characters are escaped.
    """

    kind: str
    """The exception's name, ``not finite``, ``too large``, ``not a number``, ``no reward``,
    ``deadline`` or ``crash``.
    """
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", shown(self.kind))
        object.__setattr__(self, "message", escaped(hidden(self.message)))


Outcome: TypeAlias = float | Failure


_ISOBIT = str(Path(__file__).resolve().parents[1])
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
"""What a class of its own may have by this name is none."""
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), _ISOBIT, "<")


def failure_of(error: BaseException, with_place: bool = True) -> Failure:
    """The failure of a user's function that raised, with a shortened message and, by default, the
    line of the user's code that was executed last.
    """
    kind = type(error).__name__[:100]
    try:
        message = f"{kind}: {error}"
    except Exception as another:  # raised by the exception's own method
        message = f"{kind}, whose text raises {type(another).__name__:.100}"
    return Failure(kind, hidden(message)[:1800] + (_place_of(error) if with_place else ""))


def _place_of(error: BaseException) -> str:
    """The deepest frame that is neither a library's nor Isobit's; empty if there is none."""
    frames = list[str]()
    for frame, line in walk_tb(_TRACEBACK.__get__(error)):
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            frames.append(f" ({Path(code.co_filename).name}:{line}, in {code.co_name})")
    return hidden(frames[-1])[:200] if frames else ""


def outcome_of(value: Any) -> Outcome:
    """The outcome for a reward's return value: integers, floats, booleans and tensors of no
    dimension are numbers; anything else, or one that raises when it is converted, is a failure.
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
                "not a number",
                f"the reward returned a dict with {hidden(keys):.200}, expected 'score'",
            )
        value = value["score"]
    if value is None:
        return Failure(NO_REWARD, "the reward returned None, so it does not apply")
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        return Failure(
            "not a number",
            f"the reward returned {type(value).__name__} {hidden(repr(value)):.80}, expected a "
            "number",
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
