"""What is decided by the rewards of training: the outcome that the README of this folder fixed
before the runs.

    d[s] = reward(arm, seed s) - reward(base, seed s)

of runs of one task with the same start and seed, each the mean reward of its last ``LAST`` steps in
points; the held-out answers after the last step stand beside it.  The interval is Student's, over
the pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, stdev

from experiments.proof.rows import Row

LAST = 75
"""Steps of the outcome."""
WITHIN = 1.0
"""Points of which a difference says nothing."""
PAIRS = (
    ("fp8-int8-attention", "fp8"),
    ("int8", "bf16"),
    ("int8-backward", "bf16"),
    ("fp8-int8-attention", "bf16"),
    *((f"{ratio}-{lag}", f"clipped-{lag}") for lag in (2, 8) for ratio in ("exact", "tis")),
    *((f"clipped-{lag}", "int8-backward") for lag in (2, 8)),
)
"""Arms that are compared, and with which."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
            2.160, 2.145, 2.131)  # fmt: skip
"""The 97.5% quantile with 1, 2, .. degrees of freedom."""
_NORMAL = 1.96
"""And with many."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two arms, in points."""

    pairs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.pairs)

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval; None of a single pair."""
        count = len(self.pairs)
        if count < 2:
            return None
        return _STUDENT[count - 2] * stdev(self.pairs) / sqrt(count)

    @property
    def would_decide(self) -> int | None:
        """About how many pairs would show whether it is within ``WITHIN`` points of zero, if its
        mean and its spread stayed as they are; None where these pairs do, or where there is one.
        """
        if (half := self.half_width) is None or half < (room := abs(WITHIN - abs(self.mean))):
            return None
        return ceil((_NORMAL * stdev(self.pairs) / room) ** 2) if room else None

    def __str__(self) -> str:
        if (half := self.half_width) is None:
            return f"{self.mean:+.1f}"
        return f"{self.mean:+.1f} [{self.mean - half:+.1f}, {self.mean + half:+.1f}]"


def reward(row: Row) -> float:
    """The outcome of a run, in points."""
    return 100 * fmean(row["steps"]["reward/mean"][-LAST:])


def answers(row: Row) -> float:
    """The share of held-out problems that it solves in the end, in points."""
    return 100 * fmean(row["evaluations"][-1]["rewards"])


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each task and pair of arms that have runs of the same seeds."""
    would = f"pairs that would decide within {WITHIN:g}"
    yield f"| task | arms | pairs | reward of the last {LAST} steps | {would} | held-out answers |"
    yield "|---|---|---:|---:|---:|---:|"
    by_run = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    for task in dict.fromkeys(row["task"] for row in rows):
        for arm, base in PAIRS:
            pairs = [
                (row, by_run[task, base, seed])
                for (where, which, seed), row in sorted(by_run.items())
                if (where, which) == (task, arm) and (task, base, seed) in by_run
            ]
            if not pairs:
                continue
            earned, solved = (
                Difference(tuple(of(one) - of(other) for one, other in pairs))
                for of in (reward, answers)
            )
            cells = len(pairs), earned, earned.would_decide or "-", solved
            yield f"| `{task}` | `{arm}` - `{base}` | {' | '.join(map(str, cells))} |"
