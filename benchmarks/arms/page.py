"""One page of all rows, and one picture: tables, curves, settings, without scripts.

Drawn by the report's own code (``isobit.observe.report``); the same rows make the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arms import figures
from benchmarks.arms.cost import Costs
from benchmarks.arms.curves import STEPS_A_POINT, accuracy_chart, charts, places_of
from benchmarks.arms.problems import TASKS
from benchmarks.arms.repeats import Repeats
from benchmarks.arms.rows import Row
from benchmarks.arms.settings import Settings, settings_of
from isobit.observe.report.chart import Chart
from isobit.observe.report.page import render_template, write_page
from isobit.observe.report.panels import section_of

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
    page = render_template(
        HERE / "page.html",
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
    return write_page(f"{MARKER}\n{page}\n", out, MARKER)


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
    drawn = [Drawn(task, chart, 390 * place) for place, (task, chart) in enumerate(tasks)]
    legend = {mark.place: mark.label for one in drawn for mark in one.chart.marks}
    picture = render_template(
        HERE / "picture.svg",
        drawn=drawn,
        legend=sorted(legend.items()),
        width=390 * len(drawn),
    )
    return write_page(f"{PICTURE_MARKER}\n{picture}\n", out, PICTURE_MARKER)


def main_settings(settings: Settings) -> dict[str, str]:
    """Those that a reader looks for first."""
    return {name: text for name, text in settings.shared.items() if name.startswith(_MAIN)}


def _others(settings: Settings) -> dict[str, str]:
    main = main_settings(settings)
    return {name: text for name, text in settings.shared.items() if name not in main}
