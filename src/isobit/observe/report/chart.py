"""Series as an SVG chart of 360 x 182: ticks, paths and a table of the same numbers.

A step without a value leaves a gap.  Each curve has the steps that have its metric, and only those.
The markup is in the templates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from isobit.observe.figures import Figures
from isobit.observe.report.numbers import axis_range, number_text, round_ticks, tick_text
from isobit.observe.report.series import Buckets, Curve, Point, Series, View, series_of, smooth

LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 160
"""The edges of the plot inside the SVG."""

STEPS = View()
_NOTHING = Point(-1, None)
_FEW_POINTS = 40
"""Curves of up to this many points have a dot at each."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves and the texts of a chart."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    note: str = ""
    percent: bool = False
    axis: str = "step"
    """The x axis: steps, layers, hours, or tokens."""
    compared: bool = False
    """Whether the curves are one figure of several runs, none of which is the headline."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One curve as SVG paths; an empty path is not drawn."""

    label: str
    place: int
    """Its number among the panel's curves, from 1, which is its colour."""
    line: str = ""
    raw: str = ""
    """The line before smoothing."""
    band: str = ""
    bars: str = ""
    """The intervals of points that no band can join to another."""
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as the template draws it."""

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
    """A sentence on points that show more than one step; empty where none does."""
    constant: str
    """The value that every step and curve has, stated instead of drawn; empty if values differ."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps steps and values to positions in the SVG."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(LEFT + (step - low) / (high - low) * (RIGHT - LEFT), 1)

    def y(self, value: float | None) -> float:
        low, high = self.values
        return round(BOTTOM - ((value or 0.0) - low) / (high - low) * (BOTTOM - TOP), 1)


def draw(
    panel: Panel, figures: Mapping[int, Mapping[str, float | None]], view: View = STEPS
) -> Chart | None:
    """The chart of a panel; None where the run has none of its figures."""
    columns = figures if isinstance(figures, Figures) else Figures.of_rows(figures)
    return draw_series(panel, [series_of(columns, curve, view) for curve in panel.curves], view)


def draw_series(panel: Panel, several: Sequence[Series | None], view: View) -> Chart | None:
    """The chart of a panel whose curves have these series; None where none has a value."""
    drawn = [
        (place, curve, smooth(series, 1 if curve.between else view.smoothing))
        for place, (curve, series) in enumerate(zip(panel.curves, several, strict=True), 1)
        if series is not None
    ]
    if not drawn:
        return None
    panel = panel if view.axis == "step" else replace(panel, axis=view.axis)
    lines = [series for _, _, series in drawn]
    buckets = Buckets.of(lines, view.axis)
    points = [buckets.points(series, curve.take) for _, curve, series in drawn]
    spans = buckets.spans(lines)
    numbers = {n for each in points for p in each for n in (p.value, p.low, p.high, p.raw)}
    values = [number for number in numbers if number is not None]
    first, last = min(spans.values())[0], max(end for _, end in spans.values())
    margin = 0.5 if first == last else 0.0
    frame = Frame((first - margin, last + margin), axis_range(min(values), max(values)))
    # Any other tick on the axis of a figure that never changes would be made up.
    ticks = values if len(values) == 1 else round_ticks(*frame.values, most=5)
    columns, rows = _table(panel, spans, [curve for _, curve, _ in drawn], points)
    texts = [", ".join(map(" ".join, zip(columns, row, strict=True))) for row in rows]
    newest = lines[0].value if lines[0].raw is None else lines[0].raw
    latest = number_text(float(newest[~np.isnan(newest)][-1]), panel.percent)
    middles = {number: frame.x((low + high) / 2) for number, (low, high) in spans.items()}
    return Chart(
        panel=panel,
        marks=tuple(
            _mark(frame, middles, each, curve.label, place)
            for (place, curve, _), each in zip(drawn, points, strict=True)
        ),
        x_ticks=tuple(
            (frame.x(step), tick_text(step))
            for step in round_ticks(*frame.steps, most=6, whole=panel.axis != "hours")
        ),
        y_ticks=tuple((frame.y(value), tick_text(value, panel.percent)) for value in ticks),
        hits=tuple(zip(_strips(list(middles.values())), texts, strict=True)),
        columns=columns,
        rows=rows,
        latest=(f"{drawn[0][1].label} " if len(drawn) > 1 else "") + latest,
        description=f"{panel.title}, {panel.unit}, over {len(spans)} points; last: {texts[-1]}",
        points_note=_points_note(panel, view, buckets, lines),
        constant=number_text(values[0], panel.percent)
        if len(values) == 1 and len(spans) > 1
        else "",
    )


def _mark(
    frame: Frame, middles: Mapping[int, float], points: Sequence[Point], label: str, place: int
) -> Mark:
    pieces: list[list[tuple[float, Point]]] = [[]]
    """Points without a gap between them, with their positions on the x axis."""
    for point in points:
        if point.value is None:
            pieces.append([])
        else:
            pieces[-1].append((middles[point.bucket], point))
    pieces = [piece for piece in pieces if piece]
    lines = [[(x, frame.y(point.value)) for x, point in piece] for piece in pieces]
    raw = [[(x, frame.y(p.raw)) for x, p in piece if p.raw is not None] for piece in pieces]
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
        label=label,
        place=place,
        line="".join(_polyline(line) for line in lines if len(line) > 1),
        raw="".join(_polyline(line) for line in raw if len(line) > 1),
        band="".join(_polyline(band) + "Z" for band in bands),
        bars="".join(map(_polyline, bars)),
        dots=tuple(chain.from_iterable(lines))
        if len(points) <= _FEW_POINTS or len(pieces) > 1
        else (),
    )


def _polyline(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _strips(middles: Sequence[float]) -> list[str]:
    """The strip of the plot that is nearest to each point, as a path."""
    borders = [float(LEFT), *((a + b) / 2 for a, b in pairwise(middles)), float(RIGHT)]
    return [f"M{left:.1f} {TOP}V{BOTTOM}H{right:.1f}V{TOP}Z" for left, right in pairwise(borders)]


def _table(
    panel: Panel,
    spans: Mapping[int, tuple[float, float]],
    curves: Sequence[Curve],
    points: Sequence[Sequence[Point]],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """A row per bucket; a column per curve, and two more where it has a range."""
    columns, cells = [panel.axis], [[_span_text(*span, panel.axis) for span in spans.values()]]
    for curve, each in zip(curves, points, strict=True):
        by_bucket = {point.bucket: point for point in each}
        here = [by_bucket.get(number, _NOTHING) for number in spans]
        columns.append(curve.label)
        cells.append([number_text(point.value, panel.percent) for point in here])
        if any(point.low is not None for point in each):
            columns += ["low", "high"]
            cells.append([number_text(point.low, panel.percent) for point in here])
            cells.append([number_text(point.high, panel.percent) for point in here])
    return tuple(columns), tuple(zip(*cells, strict=True))


def _span_text(first: float, last: float, axis: str) -> str:
    text = number_text if axis in ("hours", "tokens") else "{:.0f}".format
    return text(first) if first == last else f"{text(first)}\N{EN DASH}{text(last)}"


def _points_note(panel: Panel, view: View, buckets: Buckets, several: Sequence[Series]) -> str:
    """A sentence on points that show more than one step; empty where none does."""
    notes = []
    if any(series.raw is not None for series in several):
        notes.append(f"Smoothed: the mean of the last {view.smoothing} values; faint: each.")
    steps = max(buckets.largest(series) for series in several)
    if steps > 1:
        takes = {curve.take for curve in panel.curves}
        shown = {"mean": "mean", "max": "highest", "min": "lowest"}[takes.pop()]
        if takes:  # of several kinds
            shown = "mean, highest or lowest"
        has_bounds = any(series.low is not None for series in several)
        band = "" if has_bounds else "; band: their lowest to highest"
        most = "up to " if view.axis != "step" else ""
        word = "layer" if panel.axis == "layer" else "step"
        notes.append(f"A point is the {shown} of {most}{steps} {word}s{band}.")
    return " ".join(notes)
