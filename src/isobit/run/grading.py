"""Grading in a training, recorded and by all ranks together.

Rewards that are recorded of an interrupted run come from its record, the others from the graders,
who begin with each group as soon as it is complete.  Each rank of a world grades some of the
groups, and all ranks get all rewards; they are counted in the order of the groups, so it does not
matter who graded which.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from isobit.parallel.world import World, raised_on_all, run_and_gather
from isobit.records.text import Group
from isobit.rewards.grading import Graders, ModelScores
from isobit.rewards.tally import GradeStats, Tally
from isobit.run.interruption import Interruption
from isobit.store.reward_record import RewardRecord
from isobit.store.waiting_writer import WaitingWriter
from isobit.util.errors import RewardError


@dataclass(frozen=True, slots=True)
class RecordedGrading:
    """Grading from the record where it goes on, and by the graders otherwise; a signal ends it."""

    record: RewardRecord
    graders: Graders | None
    """The processes that grade; None where nothing is graded."""
    models: ModelScores
    """Functions that score the parts that are reward models."""
    interruption: Interruption
    world: World
    writer: WaitingWriter | None = None
    """Writes the record; None where that is sent to others."""

    def submit(self, group: Group) -> None:
        """Begin to grade a group, unless its rewards are recorded."""
        if self.graders is not None and not self.record.is_ahead:
            self.graders.submit(group)

    def is_done(self, group: Group) -> bool:
        """Whether a submitted group needs no more waiting for; others are graded when asked for."""
        return self.graders is None or self.graders.is_done(group)

    def poll(self) -> None:
        """Look after what grades beside the rollout, without waiting for it."""
        if self.graders is not None:
            self.graders.poll()

    def __call__(
        self, groups: Sequence[Group], graded_by: Sequence[int] | None = None
    ) -> GradeStats:
        """Fill the rewards of groups (``isobit.rewards.grading.Grading``), which all ranks have.

        ``graded_by`` are the ranks that grade each: those that have submitted them.
        """
        stats = self.record.grade(groups, partial(self._ask, graded_by))
        self._write()
        return stats

    def append(self, lines: Sequence[bytes]) -> None:
        """Record gradings that others have made.  All ranks together."""
        self.record.append(lines)
        self._write()

    def _write(self) -> None:
        if self.writer is not None:
            self.writer.write_on_first(self.record.write)

    def _ask(self, graded_by: Sequence[int] | None, groups: Sequence[Group]) -> GradeStats:
        assert self.graders is not None, "nothing is graded without a reward"
        return grade_together(
            self.world, self.graders, groups, self.models, self.interruption, graded_by
        )


def grade_together(
    world: World,
    graders: Graders,
    groups: Sequence[Group],
    models: ModelScores | None = None,
    interruption: Interruption | None = None,
    graded_by: Sequence[int] | None = None,
) -> GradeStats:
    """Fill the rewards of groups, which all ranks have, each by one rank: that of ``graded_by``, or
    by turns.  Raises as ``Graders.collect`` does, on all ranks.
    """
    graded_by = graded_by or [index % world.size for index in range(len(groups))]
    mine = [index for index, rank_of_group in enumerate(graded_by) if rank_of_group == world.rank]
    watch = interruption.check if interruption else None
    # a reward in this process may sleep for an hour
    inside = interruption.answered_at_once if interruption else nullcontext

    def graded() -> list[list[Any]]:
        tallies = graders.fill([groups[index] for index in mine], models, watch, inside)
        return [
            [index, *_value(groups[index], tally)]
            for index, tally in zip(mine, tallies, strict=True)
        ]

    tallies: dict[int, Tally] = {}
    for rank, of_rank in enumerate(run_and_gather(world, graded)):
        for index, rewards, parts, counts in of_rank:
            tallies[index] = _tally_of(counts)
            if rank != world.rank:
                groups[index].rewards = rewards
                groups[index].reward_parts = dict(parts)
    try:
        return graders.stats([tallies[index] for index in range(len(groups))])
    except RewardError as error:
        raise raised_on_all(error) from None


def _value(group: Group, tally: Tally) -> list[Any]:
    """A graded group as a message; names that a reward chose are no keys in it."""
    counted = [
        tally.completions,
        tally.failed,
        list(tally.failures.items()),
        tally.first_error,
        list(tally.counts.items()),
    ]
    return [group.rewards, list(group.reward_parts.items()), counted]


def _tally_of(counted: Sequence[Any]) -> Tally:
    completions, failed, failures, first_error, counts = counted
    return Tally(completions, failed, Counter(dict(failures)), first_error, Counter(dict(counts)))
