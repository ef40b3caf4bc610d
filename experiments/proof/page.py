"""The page and the picture of the proof, from all rows, drawn by the code of the report
(``isobit.observe.report``) without scripts; the same rows make the same bytes.

Each arm has a colour.  Its line is the mean over its seeds, in a band from the lowest to the
highest of them: figure ``A:figure`` of arm A has the band ``A:figure/low`` to ``A:figure/high``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from experiments.proof import figures, ladder, sizes
from experiments.proof.cost import Costs
from experiments.proof.figures import by_arm
from experiments.proof.rows import Repeats, Row, Settings, settings_of
from experiments.proof.sizes import Difference, Measured, Stage
from experiments.proof.suite import ARMS, TASKS
from isobit.observe.report.chart import BOTTOM, LEFT, RIGHT, TOP, Chart, Mark, Panel, draw
from isobit.observe.report.comparison import MOST_RUNS
from isobit.observe.report.numbers import axis_range, round_ticks, tick_text
from isobit.observe.report.panels import section_of
from isobit.observe.report.series import Curve
from isobit.observe.report.templates import render_page, write_page

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

STEPS_A_POINT = 5
"""One step's mean reward is so noisy that six arms of it are a smear."""

Series = Mapping[int, float]
"""A figure by step."""


def charts(rows: Sequence[Row]) -> list[Chart]:
    """The charts of one task; a figure that no row has is left out."""
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
    finished or not, as long as the colours last; arms without one stand in the tables alone.
    """
    found = by_arm(rows)
    arms = list(dict.fromkeys((*ARMS, *found)))
    if len(arms) > MOST_RUNS:
        arms = list(found)[:MOST_RUNS]
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


_PLACES = {arm: place for place, arm in enumerate(ARMS, 1)}
_PLACES["fp8-int8-attention"] = _PLACES["fp8-fp32-scales"]  # which the ladder has not
SIZE_PLACES = {arm: place for arm, place in _PLACES.items() if arm in sizes.ARMS}
"""The colours of the ladder's arms, those that they have in every task."""
_LAW = "N^-0.4", 0
"""Its label and its colour, of which ``page.html`` and ``picture.svg`` know: grey and dashed, where
the arms' lines are not.
"""
_ORDER = sorted(ladder.SIZES, key=ladder.PARAMETERS.__getitem__)
_INSIDE = 22.0
"""From the sides of a chart to the smallest and the largest size, in units of the SVG."""
_APART, _BESIDE, _DIAMOND = 4.0, 22.0, 4.0
"""Between arms of one size, from them to ``ladder.PRETRAINED``, and half of its diamond."""
_SIZES_NOTE = (
    "N: parameters of the layers' matrices, on a logarithmic axis. Bars: 95% intervals. Open "
    "diamonds: SmolLM2-135M, pretrained, whose layers are as large as those of 108m. Dashed: "
    "N^-0.4 through SmolLM2's fp8 and int8."
)


def size_charts(found: Sequence[Measured]) -> list[Chart]:
    """The difference of each arm to ``bf16`` against the parameters of the layers: a chart for each
    moment at which the ladder was measured.
    """
    of_ladder = [one for one in found if one.size in ladder.SIZES]
    return [
        _size_chart(stage, found)
        for stage in sizes.STAGES
        if any(stage in one.differences for one in of_ladder)
    ]


def _size_chart(stage: Stage, found: Sequence[Measured]) -> Chart:
    shown = {
        arm: {
            one.size: one.differences[stage]
            for one in found
            if one.arm == arm and stage in one.differences
        }
        for arm in SIZE_PLACES
    }
    shown = {arm: ours for arm, ours in shown.items() if ours}
    laws = [line for arm in sizes.CALIBRATED if (line := _law_line(found, arm, stage))]
    differences = [one for ours in shown.values() for one in ours.values()]
    values = [v for d in differences for v in (d.mean, d.low, d.high) if v is not None]
    values += [0.0, *(value for line in laws for _, value in line)]
    low, high = axis_range(100 * min(values), 100 * max(values))

    def y(value: float) -> float:
        return round(BOTTOM - (100 * value - low) / (high - low) * (BOTTOM - TOP), 1)

    label, place = _LAW
    paths = "".join(_path([(x, y(value)) for x, value in line]) for line in laws)
    marks = [Mark(label, place, line=paths)] if paths else []
    for at, (arm, ours) in enumerate(shown.items()):
        marks.append(_size_mark(arm, ours, _APART * (at - (len(shown) - 1) / 2), y))
    named = [size for size in ladder.PARAMETERS if any(size in ours for ours in shown.values())]
    title = sizes.STAGES[stage].capitalize()
    return Chart(
        panel=Panel(title, "points minus bf16", (), _SIZES_NOTE, axis="N", compared=True),
        marks=tuple(marks),
        x_ticks=tuple((_x(size), size) for size in _ORDER),
        y_ticks=tuple((y(tick / 100), tick_text(tick)) for tick in round_ticks(low, high, most=5)),
        hits=(),
        columns=("size", *(f"{arm} [95%]" for arm in shown)),
        rows=tuple(
            (size, *(ours[size].text if size in ours else "-" for ours in shown.values()))
            for size in named
        ),
        latest="",
        description=f"Points minus bf16 against parameters, {sizes.STAGES[stage]}",
        points_note="",
        constant="",
    )


def _x(size: str) -> float:
    return _place_of(ladder.PARAMETERS[size])


def _place_of(parameters: float) -> float:
    first, last = (math.log(ladder.PARAMETERS[size]) for size in (_ORDER[0], _ORDER[-1]))
    share = (math.log(parameters) - first) / (last - first)
    return round(LEFT + _INSIDE + share * (RIGHT - LEFT - 2 * _INSIDE), 1)


def _law_line(found: Sequence[Measured], arm: str, stage: Stage) -> list[tuple[float, float]]:
    """Its place on the x axis and its value, between the smallest and the largest size; none of
    weights that answer in ``bf16``, of which the law says nothing.
    """
    first, last = (ladder.PARAMETERS[size] for size in (_ORDER[0], _ORDER[-1]))
    numbers = [first * (last / first) ** (step / 24) for step in range(25)]
    found_at = [(one, sizes.law(found, arm, stage, one)) for one in numbers]
    return [
        (_place_of(one), value) for one, value in found_at if value is not None and stage != "back"
    ]


def _size_mark(
    arm: str, ours: Mapping[str, Difference], shift: float, y: Callable[[float], float]
) -> Mark:
    """Lines between sizes that are neighbours on the ladder, and a diamond for
    ``ladder.PRETRAINED``; intervals as bars.
    """
    dots = {
        size: (round(_x(size) + shift, 1), y(ours[size].mean)) for size in _ORDER if size in ours
    }
    bars = ""
    for size, one in ours.items():
        x = round(_x(size) + shift - (_BESIDE if size == ladder.PRETRAINED else 0.0), 1)
        if one.low is not None and one.high is not None:
            bars += _path([(x, y(one.high)), (x, y(one.low))])
        if size == ladder.PRETRAINED:
            at, d = y(one.mean), _DIAMOND
            bars += _path([(x - d, at), (x, at - d), (x + d, at), (x, at + d)]) + "Z"
    pairs = [pair for pair in pairwise(_ORDER) if dots.keys() >= {*pair}]
    line = "".join(_path([dots[size] for size in pair]) for pair in pairs)
    return Mark(arm, SIZE_PLACES[arm], line=line, bars=bars, dots=tuple(dots.values()))


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


HERE = Path(__file__).parent
MARKER = "<!doctype html>\n<!-- isobit proof -->"
PICTURE_MARKER = "<!-- isobit proof -->"
"""The first lines: a file that does not begin with them is never overwritten."""
_MAIN = (
    "start.",
    "device.model",
    "versions.isobit",
    "versions.torch",
    "bits.kernels",
    "inputs.data.",
    "config.algorithm.name",
    "config.algorithm.clip_",
    "config.algorithm.dynamic_sampling",
    "config.rollout.max_new_tokens",
    "config.rollout.temperature",
    "config.training.steps",
    "config.training.prompts_per_step",
    "config.training.samples_per_prompt",
    "config.training.updates_per_batch",
    "config.training.learning_rate",
    "config.training.warmup_updates",
    "config.training.max_grad_norm",
    "config.evaluation.every",
)
"""How the names of the settings begin that are shown unfolded."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart of the picture, and where it stands."""

    title: str
    chart: Chart
    left: int


def write_html(
    rows: Sequence[Row],
    again: Repeats,
    costs: Costs,
    out: Path,
    over_sizes: Sequence[Measured] = (),
) -> Path:
    """The whole page, with a section of sizes where any of the ladder was measured.  Raises
    ConfigError where another file is there.
    """
    tasks = figures.by_task(rows)
    has_sizes = any(one.size != ladder.PRETRAINED for one in over_sizes)
    page = render_page(
        HERE / "page.html",
        MARKER,
        name="Does exact FP8 learn like BF16?",
        kind="proof",
        refresh=0,
        columns=figures.COLUMNS,
        steps_a_point=STEPS_A_POINT,
        colours={task: places_of(ours) for task, ours in tasks.items()},
        tables=figures.tables(rows, again, costs),
        sections=[section_of(task, charts(ours)) for task, ours in tasks.items()],
        stress=figures.STRESS,
        sizes=list(sizes.table(over_sizes)) if has_sizes else [],
        size_columns=sizes.COLUMNS,
        size_charts=size_charts(over_sizes) if has_sizes else [],
        size_colours=SIZE_PLACES,
        settings={task: settings_of(ours) for task, ours in tasks.items()},
        main=main_settings,
        others=_others,
    )
    return write_page(page, out, MARKER)


def write_picture(rows: Sequence[Row], out: Path) -> Path:
    """The accuracy of all arms over the steps, a chart for each task of the proof, as SVG.  Raises
    ValueError where none of the rows is of these, ConfigError where another file is there.
    """
    ours = [row for row in rows if row["task"] in TASKS]
    places = places_of(ours)
    charts_of = ((task, accuracy_chart(one, places)) for task, one in figures.by_task(ours).items())
    tasks = [(task, chart) for task, chart in charts_of if chart is not None]
    if not tasks:
        raise ValueError("no finished run of the proof's tasks: there is nothing to draw")
    return write_accuracy(tasks, out)


def write_sizes_picture(found: Sequence[Measured], out: Path) -> Path:
    """The difference to ``bf16`` against size, a chart for each moment, as SVG.  Raises ValueError
    where no arm of the ladder was measured, ConfigError where another file is there.
    """
    if not any(one.differences for one in found if one.size != ladder.PRETRAINED):
        raise ValueError("no two arms of the ladder are finished: there is nothing to draw")
    titled = [(chart.panel.title, chart) for chart in size_charts(found)]
    described = "Points minus bf16 against parameters"
    return _write_charts(titled, out, described, "points minus bf16; diamonds: SmolLM2-135M")


def write_accuracy(tasks: Sequence[tuple[str, Chart]], out: Path) -> Path:
    """A picture of the ``accuracy_chart`` of each task.  Raises ConfigError where another file is
    there.
    """
    titled = [(f"{task}: held-out accuracy", chart) for task, chart in tasks]
    over = "over the steps, an arm a line, a band from the lowest to the highest seed"
    return _write_charts(titled, out, f"Held-out accuracy {over}")


def _write_charts(
    titled: Sequence[tuple[str, Chart]], out: Path, described: str, note: str = ""
) -> Path:
    """A picture of charts side by side, each with its title, one legend for all and a note beside
    it.  Raises ConfigError where another file is there.
    """
    drawn = [Drawn(title, chart, 390 * place) for place, (title, chart) in enumerate(titled)]
    legend = {mark.place: mark.label for one in drawn for mark in one.chart.marks}
    picture = render_page(
        HERE / "picture.svg",
        PICTURE_MARKER,
        drawn=drawn,
        legend=sorted(legend.items()),
        note=note,
        width=390 * len(drawn),
        described=described,
    )
    return write_page(picture, out, PICTURE_MARKER)


def main_settings(settings: Settings) -> dict[str, str]:
    """The settings that a reader looks for first."""
    return {name: text for name, text in settings.shared.items() if name.startswith(_MAIN)}


def _others(settings: Settings) -> dict[str, str]:
    main = main_settings(settings)
    return {name: text for name, text in settings.shared.items() if name not in main}
