"""The line of a step: as much of it as a terminal has room for, with colours for good and bad.

A log file has no width: there, every part is in the line.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GOOD, BAD, WARNING = "green", "bold red", "yellow"
"""Styles of a terminal; nothing of them reaches a file."""

GAP = "  "
"""Between two parts."""

_STEPS = 10
"""Of which the time that is left is told."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line.

    ``shorter`` has what may stand in its place where the line is too long, with the order in which
    that is done over all parts: the lowest number first; the empty text leaves the part out.
    """

    text: str
    style: str = ""
    shorter: tuple[tuple[int, str], ...] = ()


def fit(parts: Sequence[Part], width: int | None) -> list[Part]:
    """The parts as they stand in a line of at most ``width`` columns, as far as they can be cut."""
    found = list(parts)
    cuts = sorted((cut, place) for place, part in enumerate(parts) for cut in part.shorter)
    for (_, text), place in cuts:
        if width is None or _length(found) <= width:
            break
        found[place] = Part(text, parts[place].style)
    return [part for part in found if part.text]


def _length(parts: Sequence[Part]) -> int:
    return len(GAP.join(part.text for part in parts if part.text))


class TimeLeft:
    """How long a run will still take, from the pace of its last steps, evaluations and checkpoints
    between them included; the first step warms up and does not count once there is another.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._now = steps, now
        self._ends = deque([now()], maxlen=_STEPS + 1)
        self._is_warm = False

    def after(self, step: int) -> float:
        """Seconds until the end of the run; asked once at the end of each step."""
        if len(self._ends) == 2 and not self._is_warm:
            self._ends.popleft()
            self._is_warm = True
        self._ends.append(self._now())
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self._steps - step)


def time_left(seconds: float) -> Part:
    """How long a run will still take, in a few words; ``done`` after its last step."""
    if seconds <= 0:
        return Part("done")
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    text = (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{minutes} min"
        if minutes < 90
        else f"{hours} h"
        if hours < 72
        else f"{hours / 24:.0f} days"
    )
    return Part(f"{text} left")
