"""A chart as geometry: what a panel shows, its points, and the paths of an SVG of 360 x 182.

A long run is put together into at most ``MAX_POINTS`` points of equally many steps.  A point shows
the mean of its steps, or the highest or lowest of them where that is what the metric is, and a band
keeps their lowest and highest value: nothing that happened in one step disappears.  A step without
a value leaves a gap.  Every chart comes with a table of its numbers, and one whose value never
changes is said in words instead.

The axes are x = steps, or layers, and y = the panel's unit.  The markup stands in the templates.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

MINUS = "\N{MINUS SIGN}"


def round_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most ``most`` multiples of 1, 2 or 5 times a power of ten within ``low`` to ``high``;
    whole numbers only if asked for.
    """
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    power = max(power, 0) if whole else power
    steps = [factor * 10.0**exponent for exponent in (power, power + 1) for factor in (1, 2, 5)] + [
        10.0 ** (power + 2)
    ]
    for step in steps:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [index * step for index in range(first, last + 1)]
    raise AssertionError(f"no ticks between {low} and {high}")


def axis_range(low: float, high: float) -> tuple[float, float]:
    """The range of an axis that shows ``low`` to ``high``: a little room on both sides, none below
    zero where nothing is negative.
    """
    if low == high == 0.0:
        return 0.0, 1.0
    room = 0.06 * (high - low) or 0.1 * abs(high)
    bottom = low - room
    return (0.0 if low >= 0.0 > bottom or 0.0 <= low < 0.4 * high else bottom), high + room


def number_text(value: float | None, percent: bool = False) -> str:
    """Four significant digits, thousands separated; below 0.001 as 1e-4; a dash for none."""
    if value is None:
        return "\N{EN DASH}"
    if percent:
        return f"{100 * value:.1f}%".replace("-", MINUS)
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        text = f"{float(digits):g}e{int(exponent)}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", MINUS)


def tick_text(value: float, percent: bool = False) -> str:
    """A tick's number: 20k rather than 20,000."""
    value = float(f"{value:.10g}")  # 0.30000000000000004 is the third tick of 0.1
    if percent:
        return f"{100 * value:g}%".replace("-", MINUS)
    if abs(value) >= 10_000:
        scale, suffix = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / scale:g}{suffix}".replace("-", MINUS)
    return number_text(value)


def duration_text(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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
    """A metric to draw, and two others that its band lies between, if there are any."""

    metric: str
    label: str
    take: Literal["mean", "max", "min"] = "mean"
    """What a point shows of its steps."""
    between: tuple[str, str] | None = None


def buckets_of(figures: Figures, metrics: Iterable[str]) -> list[Bucket]:
    """The steps that have any of ``metrics``, in at most ``MAX_POINTS`` buckets."""
    wanted = set(metrics)
    steps = [step for step, row in figures.items() if wanted & row.keys()]
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [Bucket(tuple(steps[start : start + size])) for start in range(0, len(steps), size)]


def points_of(figures: Figures, curve: Curve, buckets: Sequence[Bucket]) -> list[Point]:
    return [_point(figures, curve, bucket) for bucket in buckets]


def _point(figures: Figures, curve: Curve, bucket: Bucket) -> Point:
    values = _values(figures, curve.metric, bucket)
    if not values:
        return Point(None)
    value = {"mean": fmean, "max": max, "min": min}[curve.take](values)
    if curve.between is not None:
        lows, highs = (_values(figures, metric, bucket) for metric in curve.between)
        return Point(value, fmean(lows), fmean(highs)) if lows and highs else Point(value)
    return Point(value, min(values), max(values)) if len(values) > 1 else Point(value)


def _values(figures: Figures, metric: str, bucket: Bucket) -> list[float]:
    found = (figures[step].get(metric) for step in bucket.steps)
    return [value for value in found if value is not None]


LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 160
"""The edges of the plot inside the SVG."""

_FEW_POINTS = 40
"""Up to that many points are marked by dots."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What a chart shows."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    note: str = ""
    percent: bool = False
    axis: str = "step"
    """What a point stands at: a step of a run, or a layer."""
    compared: bool = False
    """Whether the curves are the same figure of several runs: none of them stands for all."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """One curve as SVG paths; an empty path is not drawn."""

    label: str
    place: int
    """Of the panel's curves, from 1: its colour, whichever of the others are drawn."""
    line: str = ""
    band: str = ""
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that the template draws."""

    panel: Panel
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hits: tuple[tuple[str, str], ...]
    """The area of each point as a path, and the text to show over it."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    latest: str
    description: str
    """The chart in a sentence."""
    points_note: str
    """What a point of several steps shows; empty where each has its own."""
    constant: str
    """The one value of every step and curve, said instead of drawn; empty where there are
    several.
    """


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps steps and values to places."""

    steps: tuple[float, float]
    values: tuple[float, float]
    constant: float | None
    """The one value that there is."""

    def value_ticks(self) -> list[float]:
        """Only its value on the axis of a figure that never changes: any other tick would be made
        up.
        """
        return round_ticks(*self.values, most=5) if self.constant is None else [self.constant]

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(LEFT + (step - low) / (high - low) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        low, high = self.values
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)


def draw(panel: Panel, figures: Figures) -> Chart | None:
    """The chart of a panel; None where the run has none of its figures."""
    buckets = buckets_of(figures, [curve.metric for curve in panel.curves])
    curves = [(curve, points_of(figures, curve, buckets)) for curve in panel.curves]
    curves = [
        (curve, points)
        for curve, points in curves
        if any(point.value is not None for point in points)
    ]
    places = [panel.curves.index(curve) + 1 for curve, _ in curves]
    if not curves:
        return None
    frame = _frame(buckets, [points for _, points in curves])
    columns, rows = _table(panel, buckets, curves)
    return Chart(
        panel=panel,
        marks=tuple(
            _mark(frame, buckets, *curve, place)
            for curve, place in zip(curves, places, strict=True)
        ),
        x_ticks=tuple(
            Tick(frame.x(step), tick_text(step))
            for step in round_ticks(*frame.steps, most=6, whole=True)
        ),
        y_ticks=tuple(
            Tick(frame.y(value), tick_text(value, panel.percent)) for value in frame.value_ticks()
        ),
        hits=tuple(
            (strip, _words(columns, row))
            for strip, row in zip(_strips(frame, buckets), rows, strict=True)
        ),
        columns=columns,
        rows=rows,
        latest=_latest(panel, figures, curves[0][0], several=len(curves) > 1),
        description=(
            f"{panel.title}, {panel.unit}, over {len(buckets)} points; last: "
            f"{_words(columns, rows[-1])}"
        ),
        points_note=_points_note(panel, len(buckets[0].steps)),
        constant=""
        if frame.constant is None or len(buckets) == 1
        else number_text(frame.constant, panel.percent),
    )


def _frame(buckets: Sequence[Bucket], curves: Sequence[Sequence[Point]]) -> _Frame:
    first, last = buckets[0].steps[0], buckets[-1].steps[-1]
    seen = (
        number
        for points in curves
        for point in points
        for number in (point.value, point.low, point.high)
    )
    values = [number for number in seen if number is not None]
    room = 0.5 if first == last else 0.0
    return _Frame(
        (first - room, last + room),
        axis_range(min(values), max(values)),
        values[0] if len(set(values)) == 1 else None,
    )


def _mark(
    frame: _Frame,
    buckets: Sequence[Bucket],
    curve: Curve,
    points: Sequence[Point],
    place: int,
) -> Mark:
    few = len(points) <= _FEW_POINTS
    runs = _runs(buckets, points)
    spans = [[(x, point) for x, point in run if point.low is not None] for run in runs]
    return Mark(
        label=curve.label,
        place=place,
        line="".join(
            _polyline([(frame.x(x), frame.y(point.value or 0.0)) for x, point in run])
            for run in runs
            if len(run) > 1
        ),
        band="".join(_band(frame, span) for span in spans if len(span) > 1),
        dots=tuple((frame.x(x), frame.y(p.value or 0.0)) for run in runs for x, p in run)
        if few or len(runs) > 1
        else (),
    )


def _runs(buckets: Sequence[Bucket], points: Sequence[Point]) -> list[list[tuple[float, Point]]]:
    """Points without a gap between them, with their steps."""
    runs: list[list[tuple[float, Point]]] = [[]]
    for bucket, point in zip(buckets, points, strict=True):
        if point.value is None:
            runs.append([])
        else:
            runs[-1].append((bucket.middle, point))
    return [run for run in runs if run]


def _polyline(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _band(frame: _Frame, span: Sequence[tuple[float, Point]]) -> str:
    above = [(frame.x(x), frame.y(point.high or 0.0)) for x, point in span]
    below = [(frame.x(x), frame.y(point.low or 0.0)) for x, point in reversed(span)]
    return _polyline([*above, *below]) + "Z"


def _strips(frame: _Frame, buckets: Sequence[Bucket]) -> list[str]:
    """For each point, the strip of the plot that is nearest to it."""
    borders = [
        float(LEFT),
        *((frame.x(a.middle) + frame.x(b.middle)) / 2 for a, b in pairwise(buckets)),
        float(RIGHT),
    ]
    return [f"M{left:.1f} {TOP}V{BOTTOM}H{right:.1f}V{TOP}Z" for left, right in pairwise(borders)]


def _table(
    panel: Panel, buckets: Sequence[Bucket], curves: Sequence[tuple[Curve, Sequence[Point]]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The numbers of the chart: a row a point, a column a curve and two more where it has a
    range.
    """
    columns, cells = [panel.axis], [[bucket.text for bucket in buckets]]
    for curve, points in curves:
        columns.append(curve.label)
        cells.append([number_text(point.value, panel.percent) for point in points])
        if any(point.low is not None for point in points):
            columns += ["low", "high"]
            cells += [
                [number_text(number, panel.percent) for number in side]
                for side in zip(*((p.low, p.high) for p in points), strict=True)
            ]
    return tuple(columns), tuple(zip(*cells, strict=True))


def _points_note(panel: Panel, steps: int) -> str:
    if steps == 1:
        return ""
    takes = {curve.take for curve in panel.curves}
    shown = {"mean": "mean", "max": "highest", "min": "lowest"}[takes.pop()]
    if takes:  # of several kinds
        shown = "mean, highest or lowest"
    band = (
        "." if any(curve.between for curve in panel.curves) else "; band: their lowest to highest."
    )
    return f"A point is the {shown} of {steps} {panel.axis}s{band}"


def _words(columns: Sequence[str], row: Sequence[str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in zip(columns, row, strict=True))


def _latest(panel: Panel, figures: Figures, curve: Curve, several: bool) -> str:
    """The last value of the first curve, by its name where there are others."""
    values = [value for row in figures.values() if (value := row.get(curve.metric)) is not None]
    text = number_text(values[-1], panel.percent)
    return f"{curve.label} {text}" if several else text
