"""``schedule.jsonl``: what depends on time in a run with ``async.max_staleness``
(``isobit.records.schedule``), a line a step.

    {"step": 7, "learns": [["train/7", 0], ..], "drawn": [["train/9", 0, [12, 40]], ..],
     "compared": [["train/9", 0, 1, 25], ..]}

``learns`` are the groups of the step, by prompt and visit.  ``drawn`` are the groups that are open
after it, with the tokens that each of their samples had when the weights changed: what a version
of the weights drew is what has come since the line before.  ``compared`` are the samples whose
tokens by these weights were compared with the trainer's, with their lengths at that moment.

A resumed run takes the lines behind its checkpoint as they were, so that it leaves the bytes that
it had left before; ``isobit replay`` takes those of the run that it repeats.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from isobit.records.schedule import Name
from isobit.store.reward_record import LineRecord, SentLines
from isobit.util.strict_json import json_line

_DAMAGED = (
    "the line of this step in schedule.jsonl is damaged: from here on the schedule is a new one"
)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A line of ``schedule.jsonl``."""

    step: int
    learns: tuple[Name, ...]
    drawn: Mapping[Name, tuple[int, ...]]
    """Tokens of each sample of the groups that stay open."""
    compared: tuple[tuple[str, int, int, int], ...] = ()
    """Prompt, visit, sample, and tokens of it."""

    def line(self) -> bytes:
        content = {
            "step": self.step,
            "learns": self.learns,
            "drawn": [[*name, counts] for name, counts in self.drawn.items()],
            "compared": self.compared,
        }
        return json_line(content, ascii=True)

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Raises KeyError, TypeError and ValueError for a line that is none of these."""
        content: dict[str, Any] = json.loads(line)
        found = cls(
            int(content["step"]),
            tuple((str(prompt), int(visit)) for prompt, visit in content["learns"]),
            {
                (str(prompt), int(visit)): tuple(map(int, counts))
                for prompt, visit, counts in content["drawn"]
            },
            tuple(
                (str(prompt), int(visit), int(sample), int(tokens))
                for prompt, visit, sample, tokens in content["compared"]
            ),
        )
        found._check(len(content["drawn"]))
        return found

    def _check(self, num_drawn: int) -> None:
        """Raise ValueError where a group is named twice, or fewer than no tokens are counted."""
        named = {*self.learns, *self.drawn}
        is_once = len(named) == len(self.learns) + num_drawn
        counts = [count for of_group in self.drawn.values() for count in of_group]
        if not is_once or min(counts, default=0) < 0 or any(one[3] < 1 for one in self.compared):
            raise ValueError


class ScheduleRecord(LineRecord):
    """The lines of a run, of which those of steps that are repeated come again."""

    _dropped = (
        "the groups of this step are not those of before the interruption: from here on the "
        "schedule is a new one"
    )

    def recorded(self, step: int, groups: int) -> ScheduledStep | None:
        """The line of a step that learns from so many ``groups``, where one is still to come; lines
        of other steps, and from a damaged one on, are dropped.
        """
        if not self._lines:
            return None
        found = None
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            found = ScheduledStep.of_line(self._lines[0])
        if found is None or (found.step == step and len(found.learns) != groups):
            self._drop(_DAMAGED)
            return None
        if found.step != step:
            self._drop()
            return None
        return found


class SentSchedule(SentLines, ScheduleRecord):
    """A schedule whose lines are sent to the ranks that write them."""
