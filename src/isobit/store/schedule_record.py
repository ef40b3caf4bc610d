"""``schedule.jsonl``: which step learnt from which groups, and how far the others had come, a line
a step (``isobit.records.schedule``).

A resumed run takes the lines behind its checkpoint as they were, so that it leaves the bytes that
it had left before; ``isobit replay`` takes those of the run that it repeats.
"""

from isobit.records.schedule import ScheduledStep
from isobit.store.reward_record import LineRecord


class ScheduleRecord(LineRecord):
    """The lines of a run, of which those of steps that are repeated come again."""

    _dropped = (
        "the groups of this step are not those of before the interruption: from here on the "
        "schedule is a new one"
    )

    def recorded(self, step: int) -> ScheduledStep | None:
        """The line of a step, where one is still to come; lines of other steps are dropped."""
        if not self._lines:
            return None
        found = ScheduledStep.of_line(self._lines[0])
        if found.step == step:
            return found
        self._drop()
        return None
