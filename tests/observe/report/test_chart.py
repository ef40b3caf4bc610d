"""Charts: axes, points of several steps, gaps, and tables that hold what is drawn."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.observe.report.chart import (
    BOTTOM,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    Curve,
    Panel,
    axis_range,
    buckets_of,
    draw,
    duration_text,
    number_text,
    points_of,
    round_ticks,
    tick_text,
)

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
    figures = {
        step: {"loss": 100.0 if step == 250 else 1.0, "differing": 1.0 if step == 77 else 0.0}
        for step in range(1, 501)
    }
    buckets = buckets_of(figures, ["loss"])
    assert len(buckets) <= MAX_POINTS
    assert [step for bucket in buckets for step in bucket.steps] == list(range(1, 501))
    loss = points_of(figures, Curve("loss", "loss"), buckets)
    assert max(point.high or 0.0 for point in loss) == 100.0
    assert math.isclose(max(point.value or 0.0 for point in loss), (100.0 + 3.0) / 4)
    differing = points_of(figures, Curve("differing", "differing", take="max"), buckets)
    assert sum(point.value or 0.0 for point in differing) == 1.0


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
    figures: dict[int, dict[str, float | None]] = {}
    for run, steps in (("0", range(0, 31, 5)), ("1", range(0, 31, 10))):
        for step in steps:
            figures.setdefault(step, {}).update(
                {f"{run}:a": step / 40 + 0.1, f"{run}:low": 0.0, f"{run}:high": 0.9}
            )
    figures[15]["0:a"] = None
    curves = tuple(Curve(f"{n}:a", n, between=(f"{n}:low", f"{n}:high")) for n in "01")
    chart = draw(Panel("set", "", curves, compared=True), figures)
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
