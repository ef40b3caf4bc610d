"""Grading in a training: what is recorded of an interrupted run comes from there, the rest from the
graders, who begin with each group as soon as it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.records.text import Group
from isobit.rewards.grade import GradeStats
from isobit.rewards.grading import Graders, ModelScores
from isobit.run.interruption import Interruption
from isobit.store.reward_record import RewardRecord


@dataclass(frozen=True, slots=True)
class RecordedGrading:
    """Grading from the record where it goes on, and by the graders otherwise; a signal ends it."""

    record: RewardRecord
    graders: Graders | None
    """None where nothing is graded."""
    models: ModelScores
    """What scores the parts that are reward models."""
    interruption: Interruption

    def submit(self, group: Group) -> None:
        """Begin to grade a group, unless its rewards are recorded."""
        if self.graders is not None and not self.record.is_ahead:
            self.graders.submit(group)

    def poll(self) -> None:
        """Look after what grades beside the rollout, without waiting for it."""
        if self.graders is not None:
            self.graders.poll()

    def __call__(self, groups: Sequence[Group]) -> GradeStats:
        """Fill the rewards of groups (``isobit.rewards.grade.Grading``)."""
        return self.record.grade(groups, self._ask)

    def _ask(self, groups: Sequence[Group]) -> GradeStats:
        assert self.graders is not None, "nothing is graded without a reward"
        return self.graders.collect(groups, self.models, self.interruption.check)
