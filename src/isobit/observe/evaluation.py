"""The result of an evaluation, with 95% intervals (``isobit.observe.intervals``).

The mean reward over problems is called an accuracy where every reward is 0 or 1.  Greedy decoding
takes one sample a problem; above temperature 0 a problem's score is the mean of its n samples
(mean@n), and a sample counts as right for pass@k where its reward is at least 1.  A sample whose
reward failed is left out and counted; a problem all of whose samples failed is left out of every
metric.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Self

from isobit.observe.group_metrics import length_metrics
from isobit.observe.intervals import Interval, mean_interval, pass_at_k
from isobit.records.metrics import Metrics
from isobit.records.rounding import settled
from isobit.records.text import Group

RIGHT = 1.0
"""The reward from which a sample counts as right; 0.1 * 10 added up counts as 1."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of evaluating one set."""

    accuracy: float
    """Mean over problems of the mean reward of their samples; see ``is_accuracy``."""
    interval: Interval | None
    """95%, over problems; None for a single problem with a fractional score."""
    problems: int
    """Problems with at least one graded sample."""
    samples: int
    """Samples per problem."""
    failed: int
    """Samples whose reward raised or was no finite number."""
    pass_at: Mapping[int, float]
    """pass@k for k = 1, 2, 4, .. up to ``samples``; empty for one sample."""
    response_length: float
    """Mean, in tokens."""
    truncated: float
    """Share of the samples that the length limit ended."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Unusual answers by kind, as the graders counted them, and failed rewards."""
    is_accuracy: bool = True
    """Whether every reward is 0 or 1, so that their mean is the share of right answers."""
    right: float | None = None
    """Mean over problems of the share of their samples that are right (``RIGHT``); None where
    ``is_accuracy``, which it then is.
    """

    def figures(self) -> dict[str, Any]:
        """All fields, for JSON, and ``mean_reward``; ``accuracy`` is null where rewards are not all
        0 or 1.
        """
        accuracy, right = (self.accuracy, self.accuracy) if self.is_accuracy else (None, self.right)
        changed = {"accuracy": accuracy, "right": right}
        return {"mean_reward": self.accuracy, **asdict(self), **changed}

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        low, high = self.interval or (math.nan, math.nan)
        figures = {
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "problems": self.problems,
            "failed": self.failed,
        }
        figures |= {} if self.right is None else {"right": self.right}
        figures |= {"response_length": self.response_length, "truncated": self.truncated}
        figures |= {f"pass@{k}": value for k, value in self.pass_at.items()}
        return {f"eval/{name}/{figure}": value for figure, value in figures.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Undo ``dataclasses.asdict`` and JSON, which turn tuples to lists and keys to text."""
        interval = content["interval"]
        restored = {
            "interval": tuple(interval) if interval is not None else None,
            "pass_at": {int(k): value for k, value in content["pass_at"].items()},
        }
        return cls(**{**content, **restored})


def result_of(
    groups: Sequence[Group], samples: int, counts: Mapping[str, int] | None = None
) -> EvalResult:
    """The figures of graded groups of ``samples`` completions each; at least one of them has a
    reward. ``counts`` are the graders'.
    """
    graded = [
        [settled(reward, 0.0, RIGHT) for reward in group.rewards if reward is not None]
        for group in groups
    ]
    scores = [fmean(rewards) for rewards in graded if rewards]
    lengths = length_metrics(groups)
    is_accuracy = all(reward in (0.0, 1.0) for rewards in graded for reward in rewards)
    shares = [fmean(reward >= RIGHT for reward in rewards) for rewards in graded if rewards]
    return EvalResult(
        accuracy=fmean(scores),
        interval=mean_interval(scores),
        problems=len(scores),
        samples=samples,
        failed=sum(reward is None for group in groups for reward in group.rewards),
        pass_at=_pass_at(graded, samples),
        response_length=lengths["response_length/mean"],
        truncated=lengths["response_length/truncated"],
        counts=counts or {},
        is_accuracy=is_accuracy,
        right=None if is_accuracy else fmean(shares),
    )


def _pass_at(graded: Sequence[Sequence[float]], samples: int) -> dict[int, float]:
    """pass@k for powers of two, each over the problems that have k graded samples."""
    figures: dict[int, float] = {}
    for k in (1 << power for power in range(samples.bit_length())) if samples > 1 else ():
        enough = [rewards for rewards in graded if len(rewards) >= k]
        if enough:
            figures[k] = fmean(
                pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), k)
                for rewards in enough
            )
    return figures
