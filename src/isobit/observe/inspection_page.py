"""An inspection as text of at most 80 columns, and as one HTML page without scripts that also draws
FP8's error, scales, saturated and flushed numbers over the layers.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap

import isobit
from isobit.observe.inspection import Fp8Figures, GpuFigures, Inspection, MatrixFigures, together
from isobit.observe.report.chart import Chart, Curve, Figures, Panel, draw
from isobit.observe.report.page import render_template, write_page
from isobit.observe.report.panels import Tile
from isobit.util.terminal import gib

WIDTH = 80
WORST = 5
"""Matrices that are named."""


def describe_inspection(found: Inspection) -> list[str]:
    parts = [_model(found), _formats(found), *_fp8(found), _presets(found)]
    if found.gpu is not None:
        parts.append(_memory(found, found.gpu))
    return [line for part in parts for line in ("", *part)][1:]


def percent(share: float | None) -> str:
    """With as many digits as a reader can use; a dash for what is not known."""
    if share is None:
        return "-"
    size = 100 * share
    return "0" if size == 0 else f"{size:.2g}%" if size < 0.001 else f"{size:.3g}%"


def scale_text(scale: float) -> str:
    """``2^-12`` of a power of two, else three digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.3g}"


def scale_range(figures: Fp8Figures) -> str:
    """The smallest and the largest scale."""
    low, high = scale_text(figures.smallest_scale), scale_text(figures.largest_scale)
    return low if low == high else f"{low} to {high}"


def flow_name(found: Inspection) -> str:
    """What the matrices were measured in."""
    if found.stored:
        return "stored in FP8"
    return f"{found.preset}{', FP32 scales' if found.scales == 'fp32' else ''}"


def files_text(found: Inspection) -> str:
    return f"{found.files} file{'s' if found.files > 1 else ''}"


def describe_model(found: Inspection) -> list[str]:
    config = found.config
    heads = f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    mlp = f"MLP {config.intermediate_size:,}"
    if config.experts is not None:
        experts = config.experts
        mlp = f"{experts.count} experts of {experts.intermediate_size:,}, {experts.top_k} a token"
    head = "score head" if config.score_head else "tied" if config.tied_embeddings else "untied"
    return [
        f"{config.family}, {found.parameters:,} parameters, {config.num_layers} layers",
        f"hidden {config.hidden_size:,}, {heads}, {mlp}",
        f"vocabulary {config.vocab_size:,} ({head}), context {config.max_positions:,}",
    ]


def _model(found: Inspection) -> list[str]:
    return [f"model {found.folder}", *(f"  {line}" for line in describe_model(found))]


def _formats(found: Inspection) -> list[str]:
    rows = [
        (one.format, f"{one.tensors:,}", f"{one.numbers:,}", gib(one.num_bytes))
        for one in found.formats
    ]
    return _table(("stored", "tensors", "numbers", "size"), rows, f"in {files_text(found)}")


def _fp8(found: Inspection) -> list[list[str]]:
    layers = found.by_layer()
    if not layers:
        return [[f"{found.preset}: no matrix is E4M3"]]
    each = [(f"{layer}", together(list(linears.values()))) for layer, linears in layers.items()]
    each.append(("all", together([figures for _, figures in each])))
    header = ("layer", "error", "worst block", "saturated", "flushed", "scales")
    rows = [(layer, *_cells(figures)) for layer, figures in each]
    if found.stored:
        known = (0, 3, 5)
        header = tuple(header[i] for i in known)
        rows = [tuple(row[i] for i in known) for row in rows]
    title = f"the {len(found.matrices):,} matrices in E4M3: {flow_name(found)}"
    legend = (
        "what they were made from, and so their error, is not known"
        if found.stored
        else "error: sqrt(sum (q - x)^2 / sum x^2) of the layer; saturated: stored as 448; "
        "flushed: stored as 0, and not 0 before"
    )
    parts = [[title, *_table(header, rows), *_wrapped(legend)]]
    worst = found.worst(WORST)
    if worst:
        rows = [
            (matrix.name.removesuffix(".weight"), *_cells(matrix.figures)[:2]) for matrix in worst
        ]
        parts.append(_table(("highest error", "error", "worst block"), rows))
    return parts


def _cells(figures: Fp8Figures) -> tuple[str, ...]:
    return (
        percent(figures.error),
        percent(figures.worst_block),
        percent(figures.saturated),
        percent(figures.flushed),
        scale_range(figures),
    )


def _presets(found: Inspection) -> list[str]:
    rows = [
        (
            one.preset,
            percent(one.rollout_e4m3),
            percent(one.training_e4m3),
            one.cache.upper(),
            gib(one.published_bytes),
            "one" if one.exact else "two",
        )
        for one in found.presets
    ]
    header = ("preset", "E4M3 rollout", "E4M3 training", "KV cache", "weights", "functions")
    where = "a GPU" if found.back_end == "cuda" else "a CPU"
    return [
        *_table(header, rows),
        *_wrapped(
            f"E4M3: share of all parameters; weights: as published on {where}; functions: of "
            "rollout and training"
        ),
    ]


def _memory(found: Inspection, gpu: GpuFigures) -> list[str]:
    lines = [f"on an {gpu.gpu.upper()} with {gib(gpu.total)} free, in {found.preset}"]
    if gpu.generating:
        lines.append("  to generate alone (isobit rollout, eval):")
        lines += [f"    {name:<28}{gib(size):>12}" for name, size in gpu.generating.items()]
        if gpu.cached_tokens:
            lines.append(f"    the cache holds {gpu.cached_tokens:,} tokens")
    else:
        lines.append("  to generate: its weights and a forward do not fit")
    lines.append(f"  to train, sequences of up to {gpu.longest:,} tokens:")
    plan = [gpu.problem] if gpu.training is None else gpu.training.describe()
    return [*lines, *(part for line in plan for part in _wrapped(line))]


def _wrapped(line: str) -> list[str]:
    """A line within the width, in as many as it takes; what is a table's row stays one."""
    if len(line) <= WIDTH - 2:
        return [f"  {line}"]
    return [f"  {part}" for part in wrap(line, WIDTH - 2)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> list[str]:
    """Columns as wide as their cells; all but the first are set to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "   ".join(cells).rstrip())
    return [lines[0] + (f"   {title}" if title else ""), *lines[1:]]


MARKER = "<!doctype html>\n<!-- isobit inspection -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""
MOST_MATRICES = 200
"""That the page lists; `--json` has all."""


def write_inspection(found: Inspection, path: Path) -> Path:
    """Write the page; -> where it is.  Raises ConfigError where it cannot be."""
    return write_page(render(found), path, MARKER)


def render(found: Inspection) -> str:
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
