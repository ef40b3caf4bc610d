"""Figures over steps.  A long run is put together into at most ``MAX_POINTS`` points of equally
many steps.

A point shows the mean of its steps, or the highest of them for figures that are maxima or counts,
and keeps their lowest and highest value: nothing that happened in one step disappears.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

MAX_POINTS = 150

Figures = Mapping[int, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Steps that share a point."""

    steps: tuple[int, ...]

    @property
    def middle(self) -> float:
        """Where the point stands on the axis of steps."""
        return (self.steps[0] + self.steps[-1]) / 2

    @property
    def text(self) -> str:
        """The steps in words."""
        return (
            str(self.steps[0])
            if len(self.steps) == 1
            else f"{self.steps[0]}\N{EN DASH}{self.steps[-1]}"
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One figure over the steps of a bucket; None where no step has it."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure to draw, and what to draw around it: nothing, plus and minus another figure, or
    between two others.
    """

    metric: str
    label: str
    take: Literal["mean", "max", "per step"] = "mean"
    """Of a point's steps: the mean of those that have the figure, the highest, or the mean with 0
    for those that have it not.
    """
    spread: str | None = None
    spread_factor: float = 1.0
    """What the figure of ``spread`` is multiplied by."""
    between: tuple[str, str] | None = None


def buckets_of(figures: Figures, metrics: Iterable[str]) -> list[Bucket]:
    """The steps that have any of ``metrics``, in at most ``MAX_POINTS`` buckets."""
    wanted = set(metrics)
    steps = [step for step, row in figures.items() if wanted & row.keys()]
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [Bucket(tuple(steps[start : start + size])) for start in range(0, len(steps), size)]


def points_of(figures: Figures, curve: Curve, buckets: Sequence[Bucket]) -> list[Point]:
    """One point a bucket."""
    return [_point(figures, curve, bucket) for bucket in buckets]


def _point(figures: Figures, curve: Curve, bucket: Bucket) -> Point:
    values = _values(figures, curve.metric, bucket)
    if not values:
        return Point(None)
    if curve.take == "per step":
        return Point(sum(values) / len(bucket.steps))
    value = max(values) if curve.take == "max" else fmean(values)
    if curve.spread is not None:
        spreads = _values(figures, curve.spread, bucket)
        if not spreads:
            return Point(value)
        half = curve.spread_factor * fmean(spreads)
        return Point(value, value - half, value + half)
    if curve.between is not None:
        lows, highs = (_values(figures, metric, bucket) for metric in curve.between)
        return Point(value, fmean(lows), fmean(highs)) if lows and highs else Point(value)
    return Point(value, min(values), max(values)) if len(values) > 1 else Point(value)


def _values(figures: Figures, metric: str, bucket: Bucket) -> list[float]:
    found = (figures[step].get(metric) for step in bucket.steps)
    return [value for value in found if value is not None]
