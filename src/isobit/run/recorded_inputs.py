"""What a run is given from outside: rewards, answers of an environment, and a schedule that time
has made.  Each stands in a record, which goes to rollouters and comes back with more
(``isobit.store.reward_record``, ``isobit.store.schedule_record``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobit.run.grading import RecordedGrading
from isobit.store.reward_record import AnswerRecord
from isobit.store.schedule_record import ScheduleRecord
from isobit.store.waiting_writer import WaitingWriter


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    grading: RecordedGrading
    answers: AnswerRecord
    schedule: ScheduleRecord
    writer: WaitingWriter | None
    """Writes them; None where they are sent to others."""

    def write_answers(self) -> None:
        """Write what a rollout has recorded."""
        if self.writer is not None:
            self.writer.write_on_first(self.answers.write)

    def append_schedule(self, lines: Sequence[bytes]) -> None:
        """Lines of the schedule, repeated or new, which are written."""
        self.schedule.append(lines)
        if self.writer is not None:
            self.writer.write_on_first(self.schedule.write)

    def ahead(self) -> dict[str, list[str]]:
        """What the records of an interrupted run still have of rollouts to come."""
        records = {
            "gradings": self.grading.record,
            "answers": self.answers,
            "schedule": self.schedule,
        }
        return {
            name: [line.decode() for line in record.lines_ahead] for name, record in records.items()
        }

    def append(self, found: Mapping[str, Sequence[str]]) -> None:
        """What the rollouters were given, repeated or new.  All ranks together."""
        self.grading.append([line.encode() for line in found["gradings"]])
        self.answers.append([line.encode() for line in found["answers"]])
        self.write_answers()
        self.append_schedule([line.encode() for line in found["schedule"]])
