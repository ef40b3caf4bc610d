"""Grading a step: every completion gets a number or, if its reward failed, ``None``, which excludes
it from its group.

    reward = sum over the parts of weight * part's reward

A failed reward is never a zero: a zero teaches the policy that the answer was wrong.  Failures are
counted by kind, the first message is kept, and too many of them stop the run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from isobit.errors import RewardError
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.counts import bounded
from isobit.rewards.function import RewardFunction
from isobit.rewards.outcome import Failure, Outcome, failure_of, outcome_of

Weights: TypeAlias = Mapping[str, float]
"""Of the parts, by name, in the order in which they are added."""


@dataclass(frozen=True, slots=True)
class GradeStats:
    """How grading went: completions graded and failed, the failures by kind, the first one's
    message, and what graders met.
    """

    graded: int
    failed: int
    failures: dict[str, int]
    """Counts by kind: the exception's name, ``not finite``, ``too large``, ``not a number``,
    ``no reward``, ``deadline`` or ``crash``; of several rewards of a completion each counts.
    """
    first_error: str | None
    counts: dict[str, int] = field(default_factory=dict)
    """How often graders met something unusual in a completion that they scored, by kind
    (``isobit.rewards.counts``); no failures.
    """

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
            bounded(Counter(self.counts) + Counter(other.counts)),
        )


Grading: TypeAlias = Callable[[Sequence[Group]], GradeStats]
"""Fills the rewards of groups; raises RewardError where too many failed."""


@dataclass(slots=True)
class Tally:
    """Counts completions and failures as groups are filled."""

    completions: int = 0
    failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def fill(
        self, group: Group, weights: Weights, outcomes: Mapping[str, Sequence[Outcome]]
    ) -> None:
        """Write the rewards of a group, one entry a completion in their order, from the outcomes of
        each part; the parts themselves too where there are several.
        """
        several = len(weights) > 1
        group.rewards = []
        group.reward_parts = {name: [] for name in weights} if several else {}
        for index in range(len(group.completions)):
            parts = {name: outcomes[name][index] for name in weights}
            for name, outcome in parts.items():
                if isinstance(outcome, Failure):
                    self._count(outcome, group, index, f", {name}" if several else "")
                if several:
                    group.reward_parts[name].append(_number_of(outcome))
            reward = _weighted(weights, parts)
            if isinstance(reward, Failure) and _all_are_numbers(parts):
                self._count(reward, group, index, "")
            group.rewards.append(_number_of(reward))
            self.completions += 1
            self.failed += isinstance(reward, Failure)

    def add(self, later: "Tally") -> None:
        """Count what is behind this as well."""
        self.completions += later.completions
        self.failed += later.failed
        self.failures.update(later.failures)
        self.first_error = self.first_error or later.first_error
        self.counts.update(later.counts)

    def stats(self, max_failed_fraction: float) -> GradeStats:
        """The counts.  Raises ``RewardError`` with the first error if a larger share than
        ``max_failed_fraction`` failed, or all did.
        """
        stats = GradeStats(
            self.completions - self.failed,
            self.failed,
            dict(self.failures),
            self.first_error,
            bounded(self.counts),
        )
        if self.failed and (stats.graded == 0 or stats.failed_fraction > max_failed_fraction):
            raise RewardError(
                f"{self.failed} of {self.completions} rewards failed, more than the allowed share "
                f"of {max_failed_fraction:g} (reward.max_failed_fraction); the first was "
                f"{self.first_error}"
            )
        return stats

    def _count(self, failure: Failure, group: Group, index: int, part: str) -> None:
        self.failures[failure.kind] += 1
        if self.first_error is None:
            self.first_error = f"prompt {group.prompt.id}, sample {index}{part}: {failure.message}"


def grade(
    groups: Sequence[Group], reward: RewardFunction, max_failed_fraction: float = 1.0
) -> GradeStats:
    """Fill ``group.rewards`` of every group, one entry a completion, in their order, by a plain
    function (prompt, completion) in this process.

    Raises ``RewardError`` with the first error if a larger share than ``max_failed_fraction``
    failed, or all did.  A ``RewardError`` from the reward itself passes through: it says that no
    completion can be graded.
    """
    tally = Tally()
    for group in groups:
        outcomes = [_outcome(reward, group.prompt, one) for one in group.completions]
        tally.fill(group, {"reward": 1.0}, {"reward": outcomes})
    return tally.stats(max_failed_fraction)


def _outcome(reward: RewardFunction, prompt: Prompt, completion: Completion) -> Outcome:
    try:
        return outcome_of(reward(prompt, completion))
    except RewardError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # a reward that calls sys.exit must not end the run unnoticed
        return failure_of(error)


def _weighted(weights: Weights, parts: Mapping[str, Outcome]) -> Outcome:
    total = 0.0
    for name, weight in weights.items():
        outcome = parts[name]
        if isinstance(outcome, Failure):
            return outcome
        total += weight * outcome
    return outcome_of(total)


def _all_are_numbers(parts: Mapping[str, Outcome]) -> bool:
    return not any(isinstance(outcome, Failure) for outcome in parts.values())


def _number_of(outcome: Outcome) -> float | None:
    return None if isinstance(outcome, Failure) else outcome
