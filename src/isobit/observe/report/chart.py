"""Metrics over steps as an SVG chart of 360 x 182: ticks, paths and a table of the same numbers.

A run of more than ``MAX_POINTS`` steps is drawn in buckets of equally many steps.  A point shows
the mean, the highest or the lowest value of its bucket, and a band shows the bucket's range, so
that the extreme of a single step stays visible.  A step without a value leaves a gap; in a chart of
several runs each curve has the steps of its own run, and only those.  The x axis is steps or
layers; the markup is in the templates.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise, product
from statistics import fmean
from typing import Literal

MINUS = "\N{MINUS SIGN}"


def round_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most ``most`` multiples of 1, 2 or 5 times a power of ten within ``low`` to ``high``; with
    ``whole``, whole numbers only.
    """
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    power = max(power, 0) if whole else power
    for exponent, factor in product((power, power + 1, power + 2), (1, 2, 5)):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [index * step for index in range(first, last + 1)]
    raise AssertionError(f"no ticks between {low} and {high}")


def axis_range(low: float, high: float) -> tuple[float, float]:
    """The range of an axis that shows ``low`` to ``high``: a margin on both sides, but none below
    zero where nothing is negative.
    """
    if low == high == 0.0:
        return 0.0, 1.0
    margin = 0.06 * (high - low) or 0.1 * abs(high)
    bottom = low - margin
    return (0.0 if low >= 0.0 > bottom or 0.0 <= low < 0.4 * high else bottom), high + margin


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
    value = float(f"{value:.10g}")  # the third tick of 0.1 is 0.30000000000000004
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
    """The steps that one point shows."""

    steps: tuple[int, ...]

    @property
    def middle(self) -> float:
        return (self.steps[0] + self.steps[-1]) / 2

    @property
    def text(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return str(first) if first == last else f"{first}\N{EN DASH}{last}"


@dataclass(frozen=True, slots=True)
class Point:
    """A figure in one bucket; None where no step has it."""

    value: float | None
    low: float | None = None
    high: float | None = None
    is_known: bool = True
    """Whether any step of the bucket has the figure, with a value or without."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric to draw."""

    metric: str
    label: str
    take: Literal["mean", "max", "min"] = "mean"
    """What a point shows of its steps."""
    between: tuple[str, str] | None = None
    """The metrics that bound its band; by default the band is the range within a bucket."""


def buckets_of(figures: Figures, metrics: Iterable[str]) -> list[Bucket]:
    """The steps that have any of ``metrics``, in at most ``MAX_POINTS`` buckets."""
    wanted = set(metrics)
    steps = [step for step, row in figures.items() if wanted & row.keys()]
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [Bucket(tuple(steps[start : start + size])) for start in range(0, len(steps), size)]


def points_of(figures: Figures, curve: Curve, buckets: Sequence[Bucket]) -> list[Point]:
    points = []
    for bucket in buckets:
        values, *sides = (
            [value for step in bucket.steps if (value := figures[step].get(metric)) is not None]
            for metric in (curve.metric, *(curve.between or ()))
        )
        low = high = None
        if sides and all(sides):
            low, high = map(fmean, sides)
        elif not sides and len(values) > 1:
            low, high = min(values), max(values)
        take = {"mean": fmean, "max": max, "min": min}[curve.take]
        is_known = any(curve.metric in figures[step] for step in bucket.steps)
        points.append(Point(take(values) if values else None, low, high, is_known))
    return points


LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 160
"""The edges of the plot inside the SVG."""

_FEW_POINTS = 40
"""Curves of up to this many points have a dot at each."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What a chart shows."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    note: str = ""
    percent: bool = False
    axis: str = "step"
    """The x axis: steps, or layers."""
    compared: bool = False
    """Whether the curves are one figure of several runs, none of which is the headline."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One curve as SVG paths; an empty path is not drawn."""

    label: str
    place: int
    """Its number among the panel's curves, from 1, which is its colour."""
    line: str = ""
    band: str = ""
    bars: str = ""
    """The intervals of points that no band can join to another."""
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template draws."""

    panel: Panel
    marks: tuple[Mark, ...]
    x_ticks: tuple[tuple[float, str], ...]
    """Position in the SVG and text."""
    y_ticks: tuple[tuple[float, str], ...]
    hits: tuple[tuple[str, str], ...]
    """The area of each point as a path, and the text to show over it."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    latest: str
    description: str
    """The chart in a sentence."""
    points_note: str
    """What a point of several steps shows; empty where each step has its own point."""
    constant: str
    """The value that every step and curve has, stated instead of drawn; empty if values differ."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps steps and values to positions in the SVG."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(LEFT + (step - low) / (high - low) * (RIGHT - LEFT), 1)

    def y(self, value: float | None) -> float:
        low, high = self.values
        return round(BOTTOM - ((value or 0.0) - low) / (high - low) * (BOTTOM - TOP), 1)


def draw(panel: Panel, figures: Figures) -> Chart | None:
    """The chart of a panel; None where the run has none of its figures."""
    buckets = buckets_of(figures, [curve.metric for curve in panel.curves])
    everything = [(curve, points_of(figures, curve, buckets)) for curve in panel.curves]
    curves = [one for one in everything if any(point.value is not None for point in one[1])]
    if not curves:
        return None
    numbers = {n for _, points in curves for p in points for n in (p.value, p.low, p.high)}
    values = [number for number in numbers if number is not None]
    first, last = buckets[0].steps[0], buckets[-1].steps[-1]
    margin = 0.5 if first == last else 0.0
    frame = _Frame((first - margin, last + margin), axis_range(min(values), max(values)))
    # Any other tick on the axis of a figure that never changes would be made up.
    ticks = values if len(values) == 1 else round_ticks(*frame.values, most=5)
    columns, rows = _table(panel, buckets, curves)
    texts = [", ".join(map(" ".join, zip(columns, row, strict=True))) for row in rows]
    newest = curves[0][0]
    latest = [v for row in figures.values() if (v := row.get(newest.metric)) is not None][-1]
    return Chart(
        panel=panel,
        marks=tuple(
            _mark(frame, *_own(panel, buckets, points), curve, place)
            for place, (curve, points) in enumerate(everything, 1)
            if (curve, points) in curves
        ),
        x_ticks=tuple(
            (frame.x(step), tick_text(step))
            for step in round_ticks(*frame.steps, most=6, whole=True)
        ),
        y_ticks=tuple((frame.y(value), tick_text(value, panel.percent)) for value in ticks),
        hits=tuple(zip(_strips(frame, buckets), texts, strict=True)),
        columns=columns,
        rows=rows,
        latest=(f"{newest.label} " if len(curves) > 1 else "") + number_text(latest, panel.percent),
        description=f"{panel.title}, {panel.unit}, over {len(buckets)} points; last: {texts[-1]}",
        points_note=_points_note(panel, len(buckets[0].steps)),
        constant=number_text(values[0], panel.percent)
        if len(values) == 1 and len(buckets) > 1
        else "",
    )


def _own(
    panel: Panel, buckets: Sequence[Bucket], points: Sequence[Point]
) -> tuple[list[Bucket], list[Point]]:
    """The buckets of a curve and its points: in a chart of several runs without those that are
    steps of other runs alone.
    """
    known = [point.is_known or not panel.compared for point in points]
    return list(compress(buckets, known)), list(compress(points, known))


def _mark(
    frame: _Frame, buckets: Sequence[Bucket], points: Sequence[Point], curve: Curve, place: int
) -> Mark:
    pieces: list[list[tuple[float, Point]]] = [[]]
    """Points without a gap between them, with their positions on the x axis."""
    for bucket, point in zip(buckets, points, strict=True):
        if point.value is None:
            pieces.append([])
        else:
            pieces[-1].append((frame.x(bucket.middle), point))
    pieces = [piece for piece in pieces if piece]
    lines = [[(x, frame.y(point.value)) for x, point in piece] for piece in pieces]
    spans = [[(x, point) for x, point in piece if point.low is not None] for piece in pieces]
    bands = [
        [(x, frame.y(p.high)) for x, p in span] + [(x, frame.y(p.low)) for x, p in reversed(span)]
        for span in spans
        if len(span) > 1
    ]
    bars = [
        [(x, frame.y(point.high)), (x, frame.y(point.low))]
        for span in spans
        if len(span) == 1
        for x, point in span
    ]
    return Mark(
        label=curve.label,
        place=place,
        line="".join(_polyline(line) for line in lines if len(line) > 1),
        band="".join(_polyline(band) + "Z" for band in bands),
        bars="".join(map(_polyline, bars)),
        dots=tuple(chain.from_iterable(lines))
        if len(points) <= _FEW_POINTS or len(pieces) > 1
        else (),
    )


def _polyline(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _strips(frame: _Frame, buckets: Sequence[Bucket]) -> list[str]:
    """For each point, the strip of the plot that is nearest to it."""
    middles = [frame.x(bucket.middle) for bucket in buckets]
    borders = [float(LEFT), *((a + b) / 2 for a, b in pairwise(middles)), float(RIGHT)]
    return [f"M{left:.1f} {TOP}V{BOTTOM}H{right:.1f}V{TOP}Z" for left, right in pairwise(borders)]


def _table(
    panel: Panel, buckets: Sequence[Bucket], curves: Sequence[tuple[Curve, Sequence[Point]]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """A row per point; a column per curve, and two more where it has a range."""
    columns, cells = [panel.axis], [[bucket.text for bucket in buckets]]
    for curve, points in curves:
        found = [(curve.label, [point.value for point in points])]
        if any(point.low is not None for point in points):
            found += [("low", [p.low for p in points]), ("high", [p.high for p in points])]
        columns += [name for name, _ in found]
        cells += [[number_text(one, panel.percent) for one in values] for _, values in found]
    return tuple(columns), tuple(zip(*cells, strict=True))


def _points_note(panel: Panel, steps: int) -> str:
    if steps == 1:
        return ""
    takes = {curve.take for curve in panel.curves}
    shown = {"mean": "mean", "max": "highest", "min": "lowest"}[takes.pop()]
    if takes:  # of several kinds
        shown = "mean, highest or lowest"
    band = "" if any(curve.between for curve in panel.curves) else "; band: their lowest to highest"
    return f"A point is the {shown} of {steps} {panel.axis}s{band}."
