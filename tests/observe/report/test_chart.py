"""Charts: axes, points of several steps, gaps, and tables that hold what is drawn."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.observe.figures import Figures
from isobit.observe.report.chart import BOTTOM, LEFT, RIGHT, STEPS, TOP, Panel, draw, draw_series
from isobit.observe.report.numbers import (
    axis_range,
    duration_text,
    number_text,
    round_ticks,
    tick_text,
)
from isobit.observe.report.series import MAX_POINTS, Axis, Buckets, Curve, View, mean_of, series_of

FIGURES = {step: {"loss": float(step), "other": 1.0} for step in range(1, 501)}
finite = st.floats(-1e12, 1e12, allow_nan=False).filter(
    lambda value: value == 0 or abs(value) > 1e-12
)


@given(finite, finite, st.booleans())
def test_ticks_are_few_round_and_within(a: float, b: float, whole: bool) -> None:
    low, high = axis_range(min(a, b), max(a, b))
    assert low <= min(a, b) <= max(a, b) <= high and low < high
    ticks = round_ticks(low, high, most=6, whole=whole)
    assert len(ticks) <= 6 and ticks == sorted(set(ticks))
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in ticks)
    assert whole or len(ticks) >= 2
    assert not whole or all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (0.5781, "0.5781"),
        (1e-4, "1e\u22124"),
        (-0.25, "\u22120.25"),
        (1234.5, "1,234"),
        (None, "\u2013"),
    ],
)
def test_numbers_have_the_digits_a_reader_can_use(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_other_texts_of_numbers() -> None:
    assert number_text(0.956, percent=True) == "95.6%"
    assert [tick_text(value) for value in (20_000.0, 3e6, 3 * 0.1)] == ["20k", "3M", "0.3"]
    assert list(map(duration_text, (8.25, 61.0, 7300.0))) == ["8.2 s", "1 min 1 s", "2 h 1 min"]


def test_long_runs_keep_every_extreme() -> None:
    figures = Figures.of_rows(
        {
            step: {"loss": 100.0 if step == 250 else 1.0, "differing": 1.0 if step == 77 else 0.0}
            for step in range(1, 501)
        }
    )
    loss, differing = Curve("loss", "loss"), Curve("differing", "differing", take="max")
    series = [one for curve in (loss, differing) if (one := series_of(figures, curve, STEPS))]
    buckets = Buckets.of(series, "step")
    assert len(buckets.starts) <= MAX_POINTS
    assert buckets.largest(series[0]) == 4
    points = buckets.points(series[0], "mean")
    assert max(point.high or 0.0 for point in points) == 100.0
    assert math.isclose(max(point.value or 0.0 for point in points), (100.0 + 3.0) / 4)
    assert sum(point.value or 0.0 for point in buckets.points(series[1], "max")) == 1.0


@pytest.mark.parametrize("axis", ["step", "hours", "tokens"])
@pytest.mark.parametrize("count", [1, 7, 150, 151, 4001])
def test_every_step_is_in_one_point_on_every_axis(axis: Axis, count: int) -> None:
    generator = np.random.default_rng(count)
    rows: dict[int, dict[str, float | None]] = {
        step: {
            "loss": float(step % 91),
            "time/training_s": float(generator.exponential()) + 0.01,
            "tokens_per_s/training": 50.0,
        }
        for step in range(3, 3 + count)
    }
    rows[3 + count // 2]["loss"] = -1e6
    panel = Panel("Loss", "", (Curve("loss", "loss"),))
    chart = draw(panel, rows, View(axis))
    assert chart is not None and len(chart.rows) == len(chart.hits) <= MAX_POINTS
    assert chart.columns[0] == axis
    assert "\u22121,000,000" in {cell for row in chart.rows for cell in row}
    chart = draw(panel, rows, View(axis, first=5, last=8))
    assert (chart is None) == (count < 3)
    assert chart is None or len(chart.rows) == min(4, count - 2)


def test_a_run_without_times_has_no_curves_over_time() -> None:
    rows = {step: {"loss": 1.0 * step} for step in range(5)}
    assert draw(Panel("Loss", "", (Curve("loss", "loss"),)), rows, View("hours")) is None


def test_smoothing_is_a_mean_of_the_last_points_beside_what_it_was() -> None:
    rows: dict[int, dict[str, float | None]] = {
        step: {"loss": None if step == 4 else float(step)} for step in range(1, 8)
    }
    chart = draw(Panel("Loss", "", (Curve("loss", "loss"),)), rows, View(smoothing=3))
    assert chart is not None and chart.latest == "7"
    assert [row[1] for row in chart.rows] == ["1", "1.5", "2", "\u2013", "4", "5.5", "6"]
    assert chart.marks[0].raw.count("M") == 2 and "last 3" in chart.points_note
    plain = draw(Panel("Loss", "", (Curve("loss", "loss"),)), rows)
    assert plain is not None and plain.marks[0].raw == "" != plain.marks[0].line


def test_the_mean_of_runs_has_a_band_from_the_lowest_to_the_highest() -> None:
    curve = Curve("a", "a")
    runs: list[dict[int, float | None]] = [{1: 1.0, 2: 4.0}, {1: 3.0, 2: None, 3: 5.0}]
    series = [
        series_of(Figures.of_rows({step: {"a": v} for step, v in run.items()}), curve, STEPS)
        for run in runs
    ]
    mean = mean_of([one for one in series if one is not None])
    assert mean.steps.tolist() == mean.x.tolist() == [1, 2, 3]
    assert mean.value.tolist() == [2.0, 4.0, 5.0]
    assert mean.low is not None and mean.low.tolist() == [1.0, 4.0, 5.0]
    assert mean.high is not None and mean.high.tolist() == [3.0, 4.0, 5.0]


def test_all_geometry_lies_inside_the_plot() -> None:
    chart = draw(Panel("Loss", "nats", (Curve("loss", "loss"), Curve("other", "other"))), FIGURES)
    assert chart is not None
    for mark in chart.marks:
        places = [
            (float(x), float(y))
            for path in (mark.line, mark.band)
            for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)
        ]
        assert places and all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in places)
    assert len(chart.rows) == len(chart.hits) == 125
    assert chart.rows[0] == ("1\u20134", "2.5", "1", "4", "1", "1", "1")
    assert chart.columns == ("step", "loss", "low", "high", "other", "low", "high")


def test_a_step_without_a_value_is_a_gap() -> None:
    figures = {step: {"loss": None if step == 3 else 1.0 * step} for step in range(1, 6)}
    chart = draw(Panel("Loss", "", (Curve("loss", "loss"),)), figures)
    assert chart is not None
    assert chart.marks[0].line.count("M") == 2 and len(chart.marks[0].dots) == 4
    assert [row[1] for row in chart.rows] == ["1", "2", "\u2013", "4", "5"]


def test_each_of_several_runs_has_its_own_steps() -> None:
    """Seen before: a run's curve was torn at every step that only another run has."""
    curve = Curve("a", "a", between=("low", "high"))
    series = []
    for steps in (range(0, 31, 5), range(0, 31, 10)):
        rows: dict[int, dict[str, float | None]] = {
            step: {"a": step / 40 + 0.1, "low": 0.0, "high": 0.9} for step in steps
        }
        if 15 in rows:
            rows[15]["a"] = None
        series.append(series_of(Figures.of_rows(rows), curve, STEPS))
    chart = draw_series(Panel("set", "", (curve, curve), compared=True), series, STEPS)
    assert chart is not None
    first, second = chart.marks
    assert second.line.count("M") == 1 and second.line.count("L") == 3 and second.bars == ""
    assert first.line.count("M") == 2, "a value that is missing in a run's own step is a gap"
    assert second.band.count("M") == 1


def test_a_lone_point_has_its_interval_as_a_bar() -> None:
    curve = Curve("accuracy", "accuracy", between=("low", "high"))
    chart = draw(Panel("set", "", (curve,)), {3: {"accuracy": 0.5, "low": 0.4, "high": 0.6}})
    assert chart is not None
    (mark,) = chart.marks
    assert mark.band == mark.line == "" and mark.bars.count("M") == mark.bars.count("L") == 1


def test_a_constant_is_said_rather_than_drawn() -> None:
    panel = Panel("Differing", "tokens", (Curve("differing", "differing"),))
    chart = draw(panel, {step: {"differing": 0.0} for step in range(1, 21)})
    assert chart is not None and chart.constant == "0"
    assert draw(panel, {1: {"differing": None}}) is None and draw(panel, {}) is None


def test_intervals_of_evaluations_are_a_band() -> None:
    curve = Curve("accuracy", "accuracy", between=("low", "high"))
    panel = Panel("held_out", "accuracy", (curve,), percent=True)
    chart = draw(panel, {step: {"accuracy": 0.5, "low": 0.4, "high": 0.6} for step in range(5)})
    assert chart is not None and chart.marks[0].band.count("L") == 9
    assert chart.rows[0] == ("0", "50.0%", "40.0%", "60.0%")
