"""The curves of a task as the report draws them: a colour an arm, the mean over its seeds as a
line, and a band from the lowest to the highest of them.

A figure of arm A has the name ``A:figure``; its band lies between ``A:figure/low`` and ``/high``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.arms.figures import by_arm
from benchmarks.arms.rows import Row
from benchmarks.arms.suite import ARMS
from isobit.observe.report.chart import Chart, Curve, Panel, draw
from isobit.observe.report.page import MOST_RUNS

_ACCURACY = "accuracy"
_SHARE = "differing share"
_PANELS = (
    Panel("Held-out accuracy", "of the problems", (), "greedy", percent=True),
    Panel("Reward", "mean of the step", ()),
    Panel("Completion length", "tokens", ()),
    Panel("Entropy", "nats", (), "of the sampling distribution, over response tokens"),
    Panel("Gradient norm", "before clipping", ()),
    Panel("Mean difference", "nats", (), "mean abs(d), log-probabilities of rollout and training"),
    Panel("Probability error", "factor", (), "mean exp(abs(d)); 1: one function"),
    Panel("Differing share", "of the tokens compared", (), "their bits differ", percent=True),
)
_METRICS = (
    _ACCURACY,
    "reward/mean",
    "response_length/mean",
    "entropy",
    "grad_norm",
    "log_prob_diff/mean",
    "mismatch/mult_prob_error",
    _SHARE,
)
"""What each panel shows."""

STEPS_A_POINT = 5
"""One step's mean reward is so noisy that six arms of it are a smear."""

Series = Mapping[int, float]
"""A figure by step."""


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Of one task; a figure that no row has is left out."""
    places = places_of(rows)
    found = (
        _chart(panel, name, rows, places) for panel, name in zip(_PANELS, _METRICS, strict=True)
    )
    return [chart for chart in found if chart is not None]


def accuracy_chart(rows: Sequence[Row], arms: Iterable[str]) -> Chart | None:
    """Of one task, for a picture; ``arms`` in the order of their colours."""
    return _chart(_PANELS[0], _ACCURACY, rows, arms)


def places_of(rows: Sequence[Row]) -> dict[str, int]:
    """Arm -> its colour, from 1, in its order.  Those of ``ARMS`` have the same in every task,
    finished or not, as long as the colours last.  Raises ValueError for more arms than colours.
    """
    found = by_arm(rows)
    arms = list(dict.fromkeys((*ARMS, *found)))
    if len(arms) > MOST_RUNS:
        arms = list(found)
    if len(arms) > MOST_RUNS:
        raise ValueError(
            f"{len(arms)} arms ({', '.join(arms)}), and a chart has {MOST_RUNS} colours: draw the "
            "rows of fewer"
        )
    return {arm: place for place, arm in enumerate(arms, 1)}


def series_of(row: Row, name: str) -> Series:
    """A figure of a run, but for accuracy the mean of ``STEPS_A_POINT`` steps up to each point, of
    those that have it.
    """
    if name == _ACCURACY:
        return {one["step"]: fmean(one["rewards"]) for one in row["evaluations"]}
    steps = row["steps"]
    values = _shares(row) if name == _SHARE else steps[name]
    groups: dict[int, list[float]] = {}
    for step, value in zip(steps["step"], values, strict=True):
        if value is not None:
            end = -(-step // STEPS_A_POINT) * STEPS_A_POINT
            groups.setdefault(min(end, steps["step"][-1]), []).append(value)
    return {step: fmean(found) for step, found in groups.items()}


def _shares(row: Row) -> Iterator[float | None]:
    differing, compared = (
        row["steps"][f"log_prob_diff/tokens_{name}"] for name in ("differing", "compared")
    )
    for one, of in zip(differing, compared, strict=True):
        yield one / of if of else None


def _chart(panel: Panel, name: str, rows: Sequence[Row], order: Iterable[str]) -> Chart | None:
    arms = by_arm(rows)
    curves: list[Curve] = []
    figures: dict[int, dict[str, float | None]] = {}
    for arm in order:
        metric = f"{arm}:{name}"
        runs = [series_of(row, name) for row in arms.get(arm, [])]
        band = (f"{metric}/low", f"{metric}/high") if len(runs) > 1 else None
        curves.append(Curve(metric, arm, between=band))
        for step in {step for run in runs for step in run}:
            values = [run[step] for run in runs if step in run]
            low, high = min(values), max(values)
            figures.setdefault(step, {}).update(
                {metric: fmean(values), f"{metric}/low": low, f"{metric}/high": high}
            )
    drawn = Panel(panel.title, panel.unit, tuple(curves), panel.note, panel.percent, compared=True)
    return draw(drawn, dict(sorted(figures.items())))
