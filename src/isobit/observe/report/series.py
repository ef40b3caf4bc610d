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
"""What a step's time is made of; evaluations are not part of it."""


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
    """What ``value`` was before it was smoothed."""


def positions(figures: Figures, axis: Axis) -> Column:
    """The position of each step on the axis."""
    if axis == "step":
        return figures.steps.astype(np.float64)

    def filled(name: str) -> Column:
        column = figures.column(name)
        return np.where(np.isfinite(column), column, 0.0)

    if axis == "hours":
        return np.cumsum(sum(filled(name) for name in PHASES)) / 3600.0
    return np.cumsum(filled("tokens_per_s/training") * filled("time/training_s"))


def series_of(figures: Figures, curve: Curve, view: View) -> Series | None:
    """A curve's metric, not smoothed; None where no step has a finite value of it, or the run has
    not written what the axis shows.
    """
    column, steps, x = figures.column(curve.metric), figures.steps, positions(figures, view.axis)
    rows = np.flatnonzero(~np.isnan(column) & (steps >= view.first) & (steps <= view.last))

    def chosen(name: str) -> Column:
        values = figures.column(name)[rows]
        return np.where(np.isfinite(values), values, np.nan)

    value = chosen(curve.metric)
    if np.isnan(value).all() or (view.axis != "step" and x[-1] == 0.0):
        return None
    low, high = map(chosen, curve.between) if curve.between else (None, None)
    return Series(steps[rows], x[rows], value, low, high)


def smooth(series: Series, count: int) -> Series:
    """Each value as the mean of the last ``count`` points that have one."""
    if count < 2:
        return series
    known = ~np.isnan(series.value)

    def of_window(values: Column) -> Column:
        sums = np.cumsum(values)
        return sums - np.concatenate([np.zeros(min(count, len(sums))), sums[:-count]])

    with np.errstate(invalid="ignore"):
        means = of_window(np.where(known, series.value, 0.0)) / of_window(known.astype(np.float64))
    return replace(series, value=np.where(known, means, np.nan), raw=series.value)


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

    def points(self, series: Series, take: str) -> list[Point]:
        """What a series has in each bucket where it has any step."""
        numbers = np.searchsorted(self.starts, series.x, side="right") - 1
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        known = ~np.isnan(series.value)
        count = np.add.reduceat(known.astype(np.int64), first)

        def mean(values: Column) -> Column:
            given = ~np.isnan(values)
            sums = np.add.reduceat(np.where(given, values, 0.0), first)
            with np.errstate(invalid="ignore"):
                return sums / np.add.reduceat(given.astype(np.int64), first)

        low = np.minimum.reduceat(np.where(known, series.value, np.inf), first)
        high = np.maximum.reduceat(np.where(known, series.value, -np.inf), first)
        with np.errstate(invalid="ignore"):
            value = {"max": high, "min": low}.get(take, np.clip(mean(series.value), low, high))
        raw = mean(series.raw) if series.raw is not None else np.full(len(first), np.nan)
        if series.raw is not None:
            unsmoothed = np.where(np.isnan(series.raw), np.inf, series.raw)
            low = np.minimum.reduceat(unsmoothed, first)
            high = np.maximum.reduceat(np.where(np.isinf(unsmoothed), -np.inf, unsmoothed), first)
        if series.low is not None and series.high is not None:
            low, high = mean(series.low), mean(series.high)
            has_band = ~(np.isnan(low) | np.isnan(high))
        else:
            has_band = count > 1
        value = np.where(count > 0, value, np.nan)
        low, high = (np.where(has_band, bound, np.nan) for bound in (low, high))
        columns = (np.where(np.isnan(c), None, c).tolist() for c in (value, low, high, raw))
        return list(map(Point, numbers[first].tolist(), *columns))

    def largest(self, series: Series) -> int:
        """The most steps of a series that one point shows."""
        return int(np.bincount(np.searchsorted(self.starts, series.x, side="right")).max())

    def spans(self, several: Sequence[Series]) -> dict[int, tuple[float, float]]:
        """The first and the last position in each bucket that has any."""
        first = np.full(len(self.starts), np.inf)
        last = np.full(len(self.starts), -np.inf)
        for series in several:
            numbers = np.searchsorted(self.starts, series.x, side="right") - 1
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            ends = np.append(begins[1:], len(numbers)) - 1
            places = numbers[begins]
            first[places] = np.minimum(first[places], series.x[begins])
            last[places] = np.maximum(last[places], series.x[ends])
        return {
            number: (float(first[number]), float(last[number]))
            for number in np.flatnonzero(np.isfinite(first)).tolist()
        }
