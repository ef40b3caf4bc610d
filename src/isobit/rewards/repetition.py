"""Whether rewards depend on nothing but what they grade: now and then a group is graded again.

A reward that counts its calls, keeps a running mean or draws at random gives another number to the
same completion.  Such a run still trains, but a resumed one gets other rewards, and so do other
numbers of processes.  What is noticed is counted (``isobit.rewards.counts``), no reward changes.

The gradings that are repeated lie ever further apart: the 8th, the 16th, the 32nd, and so on.
"""

from collections import Counter
from collections.abc import Mapping

from isobit.rewards.pool import Inside, Scoring, Task, Watch

FIRST = 8
KIND = "another reward for the same completion"


class Repetition:
    """Counts the gradings of one process of the run, and repeats some in part."""

    def __init__(self) -> None:
        self._gradings = 0

    def differing(
        self, tasks: Mapping[str, Task], scoring: Scoring, watch: Watch, inside: Inside
    ) -> Counter[str]:
        """What another grading of one group, whose ``tasks`` are done, met: how many rewards came
        out other than before, by kind; nothing where it is not the turn of this grading.  Failures
        are not compared.  Raises as ``scoring`` does.
        """
        self._gradings += 1
        if self._gradings < FIRST or self._gradings.bit_count() > 1:
            return Counter()
        again = {name: Task(name, task.prompt, task.completions) for name, task in tasks.items()}
        for task in again.values():
            scoring.submit(task)
        scoring.wait(list(again.values()), watch, inside)
        differing = sum(
            isinstance(first, float) and isinstance(second, float) and first != second
            for name, task in tasks.items()
            for first, second in zip(task.outcomes, again[name].outcomes, strict=True)
        )
        return Counter({KIND: differing}) if differing else Counter()
