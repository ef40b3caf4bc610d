"""A metric over the x axis, as many points of it as a chart can show.

A series of more than ``MAX_POINTS`` points is drawn in buckets of equal width.  A point shows the
mean, the highest or the lowest value of its bucket, and its range is that of the bucket, so that
the extreme of a single step stays visible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from isobit.observe.figures import Column, Figures

MAX_POINTS = 150

Axis = Literal["step", "hours", "tokens"]
"""The x axis: steps, hours spent in them, or tokens trained on, prompts included."""
PHASES = ("time/rollout_s", "time/grading_s", "time/training_s")
"""The phases of a step, whose seconds are its time; evaluations are not part of it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric to draw."""

    metric: str
    label: str
    take: Literal["mean", "max", "min"] = "mean"
    """What a point shows of its steps."""
    between: tuple[str, str] | None = None
    """The metrics that bound its band; by default the band is the range within a bucket."""


@dataclass(frozen=True, slots=True)
class View:
    """How the curves of a page are drawn."""

    axis: Axis = "step"
    smoothing: int = 1
    """A point is the mean of so many that end with it."""
    first: float = -math.inf
    """The first step."""
    last: float = math.inf
    """The last step."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The steps that have a metric, ascending."""

    steps: Column
    x: Column
    """The position of each step on the axis, ascending."""
    value: Column
    """NaN where the metric was not finite, which leaves a gap."""
    low: Column | None = None
    high: Column | None = None
    """The bounds of the band, NaN where there is none."""
    raw: Column | None = None
    """``value`` before smoothing."""


def positions(figures: Figures, axis: Axis) -> Column:
    if axis not in figures.derived:

        def filled(name: str) -> Column:
            column = figures.column(name)
            return np.where(np.isfinite(column), column, 0.0)

        if axis == "step":
            figures.derived[axis] = figures.steps.astype(np.float64)
        elif axis == "hours":
            figures.derived[axis] = np.cumsum(sum(map(filled, PHASES))) / 3600.0
        else:
            tokens = filled("tokens_per_s/training") * filled("time/training_s")
            figures.derived[axis] = np.cumsum(tokens)
    return figures.derived[axis]


def series_of(figures: Figures, curve: Curve, view: View) -> Series | None:
    """A curve's metric, not smoothed; None where no step has a finite value of it, or the run has
    not written what the axis shows.
    """
    column, steps, x = figures.column(curve.metric), figures.steps, positions(figures, view.axis)
    begin, end = np.searchsorted(steps, view.first), np.searchsorted(steps, view.last, "right")
    rows = begin + np.flatnonzero(~np.isnan(column[begin:end]))

    def chosen(name: str) -> Column:
        values = figures.column(name)[rows]
        values[np.isinf(values)] = np.nan
        return values

    value = chosen(curve.metric)
    if np.isnan(value).all() or (view.axis != "step" and x[-1] == 0.0):
        return None
    low, high = map(chosen, curve.between) if curve.between else (None, None)
    return Series(steps[rows], x[rows], value, low, high)


def smooth(series: Series, count: int) -> Series:
    """Each value, and the bounds of its band, as the mean of the last ``count`` points that have
    one.
    """
    if count < 2:
        return series

    def window_sum(values: Column) -> Column:
        sums = np.cumsum(values)
        return sums - np.concatenate([np.zeros(min(count, len(sums))), sums[:-count]])

    def smoothed(values: Column) -> Column:
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):
            means = window_sum(np.where(known, values, 0.0)) / window_sum(known.astype(np.float64))
        return np.where(known, means, np.nan)

    low, high = (None if c is None else smoothed(c) for c in (series.low, series.high))
    return replace(series, value=smoothed(series.value), low=low, high=high, raw=series.value)


def mean_of(several: Sequence[Series]) -> Series:
    """The mean of several runs at each step that any of them has, in a band from the lowest to the
    highest of them.
    """
    merged = np.sort(np.concatenate([one.steps for one in several]), kind="stable")
    steps = merged[np.flatnonzero(np.diff(merged, prepend=merged[0] - 1))]
    value, x = np.full((2, len(several), len(steps)), np.nan)
    for row, one in enumerate(several):
        places = np.searchsorted(steps, one.steps)
        value[row, places], x[row, places] = one.value, one.x
    count = (~np.isnan(value)).sum(axis=0)
    low, high = np.fmin.reduce(value), np.fmax.reduce(value)
    with np.errstate(invalid="ignore"):
        means = np.clip(np.nansum(value, axis=0) / count, low, high)
    return Series(steps, np.maximum.accumulate(np.nanmean(x, axis=0)), means, low, high)


def minus(series: Series, first: Series) -> Series | None:
    """The difference to another run at the steps that both have; None where there are none."""
    places = np.searchsorted(first.steps, series.steps)
    places[places == len(first.steps)] = 0
    both = first.steps[places] == series.steps
    difference = series.value[both] - first.value[places[both]]
    known = ~np.isnan(difference)
    if not known.any():
        return None
    return Series(series.steps[both][known], series.x[both][known], difference[known])


@dataclass(frozen=True, slots=True)
class Point:
    """A series in one bucket; None where no step of it has a value."""

    bucket: int
    value: float | None
    low: float | None = None
    high: float | None = None
    raw: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """The parts of an x axis that one point each shows."""

    starts: Column
    """The lower edge of each, ascending."""

    @classmethod
    def of(cls, several: Sequence[Series], axis: str) -> "Buckets":
        """A bucket for each position, or ``MAX_POINTS`` of equal width at most, which are whole
        numbers but for hours.
        """
        if max(len(series.x) for series in several) <= MAX_POINTS:
            starts = np.unique(np.concatenate([series.x for series in several]))
            if len(starts) <= MAX_POINTS:
                return cls(starts)
        low = min(series.x[0] for series in several)
        high = max(series.x[-1] for series in several)
        if axis == "hours":
            return cls(np.linspace(low, high, MAX_POINTS + 1)[:-1])
        return cls(np.arange(low, high + 1, math.ceil((high - low + 1) / MAX_POINTS)))

    def _parts(self, x: Column) -> tuple[Column, Column]:
        """The buckets that have any of the positions, and where each begins among them."""
        begins = np.searchsorted(x, self.starts)
        begins[0] = 0
        filled = np.flatnonzero(np.diff(begins, append=len(x)))
        return filled, begins[filled]

    def points(self, series: Series, take: str) -> list[Point]:
        """The points of a series, one for each bucket that has any of its steps."""
        numbers, begins = self._parts(series.x)

        def sums(values: Column) -> Column:
            return np.add.reduceat(values, begins)

        def mean(values: Column) -> Column:
            known = ~np.isnan(values)
            with np.errstate(invalid="ignore"):
                return sums(np.where(known, values, 0.0)) / sums(known.astype(np.int64))

        def extremes(values: Column) -> tuple[Column, Column]:
            """NaN where no step has a value."""
            return np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)

        low, high = extremes(series.value)
        value = {"max": high, "min": low}.get(take)
        if value is None:
            value = np.clip(mean(series.value), low, high)
        raw = np.full(len(begins), np.nan) if series.raw is None else mean(series.raw)
        if series.low is not None and series.high is not None:
            low, high = mean(series.low), mean(series.high)
        else:
            low, high = extremes(series.value if series.raw is None else series.raw)
            several = sums((~np.isnan(series.value)).astype(np.int64)) > 1
            low, high = (np.where(several, bound, np.nan) for bound in (low, high))
        has_band = ~np.isnan(low + high)
        low, high = (np.where(has_band, bound, np.nan) for bound in (low, high))
        columns = (
            [None if math.isnan(number) else number for number in column.tolist()]
            for column in (value, low, high, raw)
        )
        return list(map(Point, numbers.tolist(), *columns))

    def largest(self, series: Series) -> int:
        """The most steps of a series that one point shows."""
        return int(np.diff(self._parts(series.x)[1], append=len(series.x)).max())

    def spans(self, several: Sequence[Series]) -> dict[int, tuple[float, float]]:
        """The first and the last position in each bucket that has any."""
        first = np.full(len(self.starts), np.inf)
        last = np.full(len(self.starts), -np.inf)
        for series in several:
            numbers, begins = self._parts(series.x)
            ends = np.append(begins[1:], len(series.x)) - 1
            first[numbers] = np.minimum(first[numbers], series.x[begins])
            last[numbers] = np.maximum(last[numbers], series.x[ends])
        return {
            number: (float(first[number]), float(last[number]))
            for number in np.flatnonzero(np.isfinite(first)).tolist()
        }
