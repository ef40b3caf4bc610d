"""An inspection as one HTML page without scripts: what the tables say, with FP8's error, scales,
saturated and flushed numbers drawn over the layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import isobit
from isobit.observe.inspection.describe import (
    describe_model,
    files_text,
    flow_name,
    percent,
    scale_range,
)
from isobit.observe.inspection.quantised import Fp8Figures, together
from isobit.observe.inspection.record import Inspection, MatrixFigures
from isobit.observe.report.chart import Chart, Panel, draw
from isobit.observe.report.series import Curve, Figures
from isobit.observe.report.template import render_template, write_page
from isobit.units import gib

MARKER = "<!doctype html>\n<!-- isobit inspection -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""
MOST_MATRICES = 200
"""That the page lists; `--json` has all."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure on top of the page."""

    label: str
    value: str
    detail: str


def write_inspection(found: Inspection, path: Path) -> Path:
    """Write the page; -> where it is.  Raises ConfigError where it cannot be."""
    return write_page(render(found), path, MARKER)


def render(found: Inspection) -> str:
    """The page as text."""
    listed = found.worst(MOST_MATRICES) or list(found.matrices[:MOST_MATRICES])
    page = render_template(
        "inspection.html",
        name=found.folder.resolve().name,
        about=[str(found.folder), *describe_model(found)],
        flow=flow_name(found) if found.matrices else f"{found.preset}: no matrix is E4M3",
        tiles=_tiles(found),
        charts=_charts(found),
        stored=found.stored,
        formats=[
            (one.format, f"{one.tensors:,}", f"{one.numbers:,}", gib(one.num_bytes))
            for one in found.formats
        ],
        presets=[
            (
                one.preset,
                percent(one.rollout_e4m3),
                percent(one.training_e4m3),
                one.cache.upper(),
                gib(one.published_bytes),
                "one function" if one.exact else "two functions",
            )
            for one in found.presets
        ],
        back_end="a GPU" if found.back_end == "cuda" else "a CPU",
        preset=found.preset,
        gpu=found.gpu,
        gib=gib,
        matrices=[_row(matrix) for matrix in listed],
        left_out=len(found.matrices) - len(listed),
        version=isobit.__version__,
    )
    return f"{MARKER}\n{page}\n"


def _tiles(found: Inspection) -> list[Tile]:
    formats = ", ".join(one.format for one in found.formats)
    tiles = [
        Tile("parameters", _short(found.parameters), f"{found.config.num_layers} layers"),
        Tile("on the disk", gib(found.num_bytes), f"{formats}; {files_text(found)}"),
    ]
    if found.matrices:
        every = together([matrix.figures for matrix in found.matrices])
        in_e4m3 = f"of {len(found.matrices):,} matrices, {flow_name(found)}"
        if every.error is not None:
            worst = found.worst(1)[0]
            detail = f"{in_e4m3}; highest in {worst.name}: {percent(worst.figures.error)}"
            tiles.append(Tile("error in E4M3", percent(every.error), detail))
            tiles.append(Tile("flushed", percent(every.flushed), "stored as 0, and not 0 before"))
        tiles.append(Tile("saturated", percent(every.saturated), "stored as 448"))
        tiles.append(Tile("scales", scale_range(every), in_e4m3))
    return tiles


def _short(number: int) -> str:
    """``11.3 M``."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _charts(found: Inspection) -> list[Chart]:
    """Of what is known."""
    layers = found.by_layer()
    by_linear: dict[str, Callable[[Fp8Figures], float | None]] = {
        "error": lambda one: _times_100(one.error),
        "worst": lambda one: _times_100(one.worst_block),
        "flushed": lambda one: _times_100(one.flushed),
        "saturated": lambda one: _times_100(one.saturated),
    }
    figures: Figures = {
        layer: {
            f"{name}/{linear}": value(one)
            for name, value in by_linear.items()
            for linear, one in each.items()
        }
        | _exponents(together(list(each.values())))
        for layer, each in layers.items()
    }
    panels = [
        *(
            Panel(
                title,
                "% of the root mean square" if name in ("error", "worst") else "% of the numbers",
                tuple(Curve(f"{name}/{linear}", linear) for linear in found.linears),
                note,
                axis="layer",
            )
            for name, title, note in (
                ("error", "Error", "of each linear's matrices"),
                ("worst", "Worst block", "the highest error of a block of 128x128"),
                ("flushed", "Flushed", "stored as 0, and not 0 before"),
                ("saturated", "Saturated", "stored as the largest value, 448"),
            )
        ),
        Panel(
            "Scales",
            "powers of two",
            (Curve("scale/high", "largest", take="max"), Curve("scale/low", "smallest")),
            "of all blocks of a layer",
            axis="layer",
        ),
    ]
    return [chart for panel in panels if (chart := draw(panel, figures)) is not None]


def _exponents(figures: Fp8Figures) -> dict[str, float | None]:
    return {
        "scale/low": math.log2(figures.smallest_scale),
        "scale/high": math.log2(figures.largest_scale),
    }


def _times_100(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _row(matrix: MatrixFigures) -> Sequence[str]:
    figures = matrix.figures
    return (
        matrix.name,
        " x ".join(f"{size:,}" for size in matrix.shape),
        percent(figures.error),
        percent(figures.worst_block),
        percent(figures.saturated),
        percent(figures.flushed),
        scale_range(figures),
    )
