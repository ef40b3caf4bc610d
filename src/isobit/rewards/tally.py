"""The rewards of a group from the outcomes of their parts, and counts of what failed.

    reward = sum of weight * part's reward over the parts that apply to the completion

A part that returns None does not apply; where none applies, the reward fails. A failed reward is
``None``, which excludes the completion from its group, and never 0, which would teach the policy
that the answer was wrong. Failures are counted by kind, and too many stop the run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from isobit.records.rounding import rounded_sum
from isobit.records.text import Group
from isobit.rewards.counts import bounded
from isobit.rewards.grade import NO_REWARD, Failure, Outcome, outcome_of
from isobit.util.errors import RewardError

PartWeights: TypeAlias = Mapping[str, float]
"""The parts' weights by name, in the order of addition."""


@dataclass(frozen=True, slots=True)
class GradeStats:
    """Completions graded and failed, failures by kind, the first message, and graders' counts."""

    graded: int
    failed: int
    failures: dict[str, int]
    """Failures by kind (``Failure.kind``), each of several rewards of a completion counted."""
    first_error: str | None
    counts: dict[str, int] = field(default_factory=dict)
    """Unusual answers among the graded ones, by kind (``isobit.rewards.counts``)."""

    @property
    def failed_fraction(self) -> float:
        return self.failed / max(1, self.graded + self.failed)

    def all_counts(self) -> dict[str, int]:
        """``counts``, and how many rewards failed by kind."""
        return self.counts | {f"failed: {kind}": n for kind, n in self.failures.items()}

    def __add__(self, other: "GradeStats") -> "GradeStats":
        return GradeStats(
            self.graded + other.graded,
            self.failed + other.failed,
            dict(Counter(self.failures) + Counter(other.failures)),
            self.first_error or other.first_error,
            bounded(Counter(self.counts) + Counter(other.counts)),
        )


@dataclass(slots=True)
class Tally:
    """Counts completions and failures as groups are filled."""

    completions: int = 0
    failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def fill(
        self, group: Group, weights: PartWeights, outcomes: Mapping[str, Sequence[Outcome]]
    ) -> None:
        """Write the rewards of a group, one for each completion in order, from the outcomes of each
        part; the parts themselves too if there are several.
        """
        several = len(weights) > 1
        group.rewards = []
        group.reward_parts = {name: [] for name in weights} if several else {}
        for index in range(len(group.completions)):
            parts = {name: outcomes[name][index] for name in weights}
            for name, outcome in parts.items():
                if isinstance(outcome, Failure) and outcome.kind != NO_REWARD:
                    self._count(outcome, group, index, f", {name}" if several else "")
                if several:
                    group.reward_parts[name].append(_number_of(outcome))
            reward = _weighted(weights, parts)
            if isinstance(reward, Failure) and reward not in parts.values():
                self._count(reward, group, index, "")
            group.rewards.append(_number_of(reward))
            self.completions += 1
            self.failed += isinstance(reward, Failure)

    def add(self, later: "Tally") -> None:
        self.completions += later.completions
        self.failed += later.failed
        self.failures.update(later.failures)
        self.first_error = self.first_error or later.first_error
        self.counts.update(later.counts)

    def stats(self, max_failed_fraction: float) -> GradeStats:
        """The counts. Raises ``RewardError`` if too large a share failed, or all did."""
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


def _weighted(weights: PartWeights, parts: Mapping[str, Outcome]) -> Outcome:
    """The sum over the parts that apply, a failure where one failed or none applies."""
    terms = list[float]()
    for name, weight in weights.items():
        outcome = parts[name]
        if not isinstance(outcome, Failure):
            terms.append(weight * outcome)
        elif outcome.kind != NO_REWARD:
            return outcome
    return outcome_of(rounded_sum(terms)) if terms else _nothing_applies(parts)


def _nothing_applies(parts: Mapping[str, Outcome]) -> Failure:
    which = "the reward" if len(parts) == 1 else f"each of the parts {', '.join(parts)}"
    return Failure(
        NO_REWARD,
        f"{which} returned None, which says that it does not apply to the completion; a function "
        "without a return statement returns None, too",
    )


def _number_of(outcome: Outcome) -> float | None:
    return None if isinstance(outcome, Failure) else outcome
