"""The page and the picture of the proof, from all rows, drawn by the code of the report
(``isobit.observe.report``) without scripts; the same rows make the same bytes.

Each arm has a colour.  Its line is the mean over its seeds, in a band from the lowest to the
highest of them: figure ``A:figure`` of arm A has the band ``A:figure/low`` to ``A:figure/high``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from experiments.proof import figures
from experiments.proof.cost import Costs
from experiments.proof.figures import by_arm
from experiments.proof.rows import Repeats, Row, Settings, settings_of
from experiments.proof.suite import ARMS, TASKS
from isobit.observe.report.chart import Chart, Curve, Panel, draw
from isobit.observe.report.page import MOST_RUNS, render_page, write_page
from isobit.observe.report.panels import section_of

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

    task: str
    chart: Chart
    left: int


def write_html(rows: Sequence[Row], again: Repeats, costs: Costs, out: Path) -> Path:
    """The whole page.  Raises ConfigError where another file is there."""
    tasks = figures.by_task(rows)
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
    return write_charts(tasks, out)


def write_charts(tasks: Sequence[tuple[str, Chart]], out: Path) -> Path:
    """A picture of charts side by side, each with its title, and one legend for all.  Raises
    ConfigError where another file is there.
    """
    drawn = [Drawn(task, chart, 390 * place) for place, (task, chart) in enumerate(tasks)]
    legend = {mark.place: mark.label for one in drawn for mark in one.chart.marks}
    picture = render_page(
        HERE / "picture.svg",
        PICTURE_MARKER,
        drawn=drawn,
        legend=sorted(legend.items()),
        width=390 * len(drawn),
    )
    return write_page(picture, out, PICTURE_MARKER)


def main_settings(settings: Settings) -> dict[str, str]:
    """The settings that a reader looks for first."""
    return {name: text for name, text in settings.shared.items() if name.startswith(_MAIN)}


def _others(settings: Settings) -> dict[str, str]:
    main = main_settings(settings)
    return {name: text for name, text in settings.shared.items() if name not in main}
