"""Shows an inspection as text of at most 80 columns, and as an HTML page without scripts, which
also draws the figures of 8-bit matrices over the layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import get_args

from isobit.config.precision import Preset
from isobit.memory.speed import describe_step
from isobit.observe.console import WIDTH, columns
from isobit.observe.inspection import HIGH_CREST, GpuFigures, Inspection
from isobit.observe.report.chart import Chart, Panel, draw
from isobit.observe.report.headline import Tile
from isobit.observe.report.series import Curve
from isobit.observe.report.templates import render_page, write_page
from isobit.precision.quant_tensor import EightBitFigures, Format, together
from isobit.util.terminal import counted, gib

WORST = 5
"""Matrices with the highest error that the text lists."""
MARKER = "<!doctype html>\n<!-- isobit inspection -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""
MOST_MATRICES = 200
"""Matrices that the page lists; `--json` has all."""


def describe_inspection(found: Inspection) -> list[str]:
    parts = [[f"model {found.folder}", *(f"  {line}" for line in _describe_model(found))]]
    if found.gpu is not None:
        parts.append(_memory(found, found.gpu))
    if found.formats:
        parts += [
            _table(
                ("stored", "tensors", "numbers", "size"), _formats(found), f"in {_files(found)}"
            ),
            *_by_layer(found),
        ]
    parts.append(
        [
            *_table(
                ("preset", "8-bit rollout", "training", "KV cache", "weights", "functions"),
                _presets(found),
            ),
            *_wrapped(
                f"8-bit: share of all parameters; weights: as published on {_back_end(found)}; "
                f"functions: of rollout and training{_not_there(found)}"
            ),
        ]
    )
    return [line for part in parts for line in ("", *part)][1:]


def percent(share: float | None) -> str:
    """A share with as many digits as a reader can use; a dash for an unknown one."""
    if share is None:
        return "-"
    size = 100 * share
    return "0" if size == 0 else f"{size:.2g}%" if size < 0.001 else f"{size:.3g}%"


def scale_text(scale: float) -> str:
    """``2^-12`` for a power of two, else three digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.3g}"


def _flow_name(found: Inspection) -> str:
    """The flow that the matrices were measured in."""
    return "stored in FP8" if found.stored else found.flow


def _files(found: Inspection) -> str:
    return f"{found.files} file{'s' if found.files > 1 else ''}"


def _back_end(found: Inspection) -> str:
    return "a GPU" if found.back_end == "cuda" else "a CPU"


def _not_there(found: Inspection) -> str:
    """The presets that have no row, as the back end does not compute the model in them."""
    there = [one.preset for one in found.presets]
    others = [one for one in get_args(Preset) if one not in there]
    return f"; not computed there: {', '.join(others)}" if others else ""


def _describe_model(found: Inspection) -> list[str]:
    config = found.config
    heads = f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    mlp = f"MLP {config.intermediate_size:,}"
    if config.experts is not None:
        experts = config.experts
        mlp = f"{experts.count} experts of {experts.intermediate_size:,}, {experts.top_k} a token"
        if experts.shared_size is not None:
            mlp += f" and one of {experts.shared_size:,}"
    head = "score head" if config.score_head else "tied" if config.tied_embeddings else "untied"
    return [
        f"{config.family}, {found.parameters:,} parameters, {counted(config.num_layers, 'layers')}",
        f"hidden {config.hidden_size:,}, {heads}, {mlp}",
        f"vocabulary {config.vocab_size:,} ({head}), context {config.max_positions:,}",
    ]


def _formats(found: Inspection) -> list[tuple[str, ...]]:
    return [
        (one.format, f"{one.tensors:,}", f"{one.numbers:,}", gib(one.num_bytes))
        for one in found.formats
    ]


def _presets(found: Inspection, function: str = "", functions: str = "") -> list[tuple[str, ...]]:
    return [
        (
            one.preset,
            percent(one.rollout_8bit),
            percent(one.training_8bit),
            one.cache.upper(),
            gib(one.published_bytes),
            f"one{function}" if one.exact else f"two{functions}",
        )
        for one in found.presets
    ]


@dataclass(frozen=True, slots=True)
class _Shown:
    """The figures of a format that text and page show."""

    header: tuple[str, ...]
    cells: Callable[[EightBitFigures], tuple[str, ...]]
    legend: str
    panels: tuple[tuple[str, str, str, str], ...]
    """Title, name of the figure, unit and note."""


def _scales(figures: EightBitFigures) -> str:
    low, high = scale_text(figures.smallest_scale), scale_text(figures.largest_scale)
    return low if low == high else f"{low} to {high}"


def _e4m3_cells(figures: EightBitFigures) -> tuple[str, ...]:
    shares = (figures.error, figures.worst_block, figures.saturated, figures.flushed)
    return (*map(percent, shares), _scales(figures))


def _int8_cells(figures: EightBitFigures) -> tuple[str, ...]:
    snr = "-" if figures.snr is None else f"{figures.snr:.1f} dB"
    crest = "-" if figures.crest is None else f"{figures.crest:.1f}"
    return percent(figures.error), percent(figures.worst_block), snr, crest, _scales(figures)


_OF_SQUARES, _OF_NUMBERS = "% of the root mean square", "% of the numbers"
_ERROR = ("Error", "error", _OF_SQUARES, "of each linear's matrices")
_SHOWN: dict[Format, _Shown] = {
    "e4m3": _Shown(
        ("error", "worst block", "saturated", "flushed", "scales"),
        _e4m3_cells,
        "error: sqrt(sum (q - x)^2 / sum x^2) of the layer; saturated: stored as 448; flushed: "
        "stored as 0, and not 0 before",
        (
            _ERROR,
            ("Worst block", "worst_block", _OF_SQUARES, "the highest error of a block of 128x128"),
            ("Flushed", "flushed", _OF_NUMBERS, "stored as 0, and not 0 before"),
            ("Saturated", "saturated", _OF_NUMBERS, "stored as the largest value, 448"),
        ),
    ),
    "int8": _Shown(
        ("error", "worst row", "SNR", "crest", "scales"),
        _int8_cells,
        "error: sqrt(sum (q - x)^2 / sum x^2) of the layer; crest: the highest of a row times the "
        "Hadamard matrix, its largest number over its root mean square",
        (
            _ERROR,
            ("Worst row", "worst_block", _OF_SQUARES, "the highest error of a row"),
            (
                "Crest",
                "crest",
                "times",
                "of a row times the Hadamard matrix: its largest number over its root mean square",
            ),
        ),
    ),
}


def _by_layer(found: Inspection) -> list[list[str]]:
    layers = found.by_layer()
    if not layers:
        return [[f"{found.flow}: no matrix is in 8 bits"]]
    shown = _SHOWN[found.format]
    each = [(f"{layer}", together(list(linears.values()))) for layer, linears in layers.items()]
    each.append(("all", together([figures for _, figures in each])))
    rows = [("layer", *shown.header)]
    rows += [(layer, *shown.cells(figures)) for layer, figures in each]
    legend = shown.legend
    if found.stored:
        rows = [(row[0], row[3], row[5]) for row in rows]
        legend = "what they were made from, and so their error, is not known"
    name = found.format.upper()
    title = f"the {len(found.matrices):,} matrices in {name}: {_flow_name(found)}"
    parts = [[title, *_table(rows[0], rows[1:]), *_wrapped(legend)]]
    if worst := found.worst(WORST):
        header = ("highest error", *shown.header[:2])
        rows = [(_short(one.name), *shown.cells(one.figures)[:2]) for one in worst]
        parts.append(_table(header, rows))
    if high := found.with_high_crest():
        rows = [(_short(one.name), f"{one.figures.crest:.1f}") for one in high[:WORST]]
        note = (
            f"{len(high):,} matrices have a row with a crest above {HIGH_CREST:.0f}, where INT8 is "
            "no better than FP8: precision.modules_bf16 keeps linears in BF16"
        )
        parts.append([*_table(("high crest", "crest"), rows), *_wrapped(note)])
    return parts


def _short(name: str) -> str:
    return name.removesuffix(".weight")


def _memory(found: Inspection, gpu: GpuFigures) -> list[str]:
    card = gpu.card
    count = f"{gpu.gpus} x {card.name}" if gpu.gpus > 1 else f"{card.article} {card.name}"
    lines = [f"on {count} with {gib(card.total)} free, in {found.flow}"]
    if card.is_estimated:
        lines += _wrapped(card.note().strip(" ()"))
    if gpu.generating:
        lines.append("  to generate alone (isobit rollout, eval):")
        lines += [f"    {name:<28}{gib(size):>12}" for name, size in gpu.generating.items()]
        if gpu.cached_tokens:
            lines.append(f"    the cache holds {gpu.cached_tokens:,} tokens")
    else:
        lines.append("  to generate: its weights and a forward do not fit")
    lines.append(f"  to train, sequences of up to {gpu.longest:,} tokens:")
    plan = gpu.problem.splitlines() if gpu.training is None else gpu.training.describe()
    if gpu.time is not None:
        plan = [*plan, *describe_step(gpu.time, None, card, gpu.gpus)]
    return [*lines, *(part for line in plan for part in _wrapped(line))]


def _wrapped(line: str) -> list[str]:
    """Lines within the width; one that fits, such as a row of a table, keeps its spaces, and the
    rest of one that does not is indented further.
    """
    indent = (len(line) - len(line.lstrip(" "))) * " "
    further = f"{indent}  " if indent else ""
    parts = [line] if len(line) <= WIDTH - 2 else wrap(line, WIDTH - 2, subsequent_indent=further)
    return [f"  {part}" for part in parts]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> list[str]:
    """Indented columns, and a title behind their names."""
    lines = [f"  {line}" for line in columns([header, *rows], gap="   ")]
    return [lines[0] + (f"   {title}" if title else ""), *lines[1:]]


def write_inspection(found: Inspection, path: Path) -> Path:
    """Write the page; -> its path.  Raises ConfigError where it cannot be written."""
    shown = _SHOWN[found.format]
    listed = found.worst(MOST_MATRICES) or found.matrices[:MOST_MATRICES]
    page = render_page(
        "inspection.html",
        MARKER,
        name=found.folder.resolve().name,
        about=[str(found.folder), *_describe_model(found)],
        flow=_flow_name(found) if found.matrices else f"{found.flow}: no matrix is in 8 bits",
        tiles=_tiles(found),
        charts=_charts(found),
        stored=found.stored,
        formats=_formats(found),
        presets=_presets(found, " function", " functions"),
        back_end=_back_end(found),
        flow_of_memory=found.flow,
        gpu=found.gpu,
        gib=gib,
        matrices=[
            (one.name, " x ".join(f"{size:,}" for size in one.shape), *shown.cells(one.figures))
            for one in listed
        ],
        header=("matrix", "shape", *shown.header),
        format=found.format.upper(),
        left_out=len(found.matrices) - len(listed),
    )
    return write_page(page, path, MARKER)


def _tiles(found: Inspection) -> list[Tile]:
    number = found.parameters
    units = ((10**9, " B"), (10**6, " M"), (10**3, " k"))
    short = (f"{number / unit:.3g}{name}" for unit, name in units if number >= 0.9995 * unit)
    formats = ", ".join(one.format for one in found.formats)
    tiles = [
        Tile("parameters", next(short, str(number)), counted(found.config.num_layers, "layers")),
        Tile("on the disk", gib(found.num_bytes), f"{formats}; {_files(found)}"),
    ]
    if found.matrices:
        every = together([matrix.figures for matrix in found.matrices])
        name, measured = (
            found.format.upper(),
            f"of {len(found.matrices):,} matrices, {_flow_name(found)}",
        )
        if every.error is not None:
            worst = found.worst(1)[0]
            detail = f"{measured}; highest in {worst.name}: {percent(worst.figures.error)}"
            tiles.append(Tile(f"error in {name}", percent(every.error), detail))
        if every.crest is not None:
            high = len(found.with_high_crest())
            detail = f"the highest of a row; above {HIGH_CREST:.0f} in {high:,} matrices"
            tiles.append(Tile("crest", f"{every.crest:.1f}", detail))
        else:
            if every.flushed is not None:
                tiles.append(Tile("flushed", percent(every.flushed), "stored as 0, not 0 before"))
            tiles.append(Tile("saturated", percent(every.saturated), "stored as 448"))
        tiles.append(Tile("scales", _scales(every), measured))
    return tiles


def _charts(found: Inspection) -> list[Chart]:
    """The figures over the layers, as far as they are known."""
    by_linear = _SHOWN[found.format].panels
    figures: dict[int, dict[str, float | None]] = {
        layer: {
            f"{name}/{linear}": None
            if (value := one.as_json()[name]) is None
            else (1 if name == "crest" else 100) * value
            for _, name, _, _ in by_linear
            for linear, one in each.items()
        }
        | {
            "low": math.log2(min(one.smallest_scale for one in each.values())),
            "high": math.log2(max(one.largest_scale for one in each.values())),
        }
        for layer, each in found.by_layer().items()
    }
    panels = [
        Panel(
            title,
            unit,
            tuple(Curve(f"{name}/{linear}", linear) for linear in found.linears),
            note,
            axis="layer",
        )
        for title, name, unit, note in by_linear
    ]
    extremes = (Curve("high", "largest", take="max"), Curve("low", "smallest"))
    note = "of all blocks of a layer" if found.format == "e4m3" else "of all rows of a layer"
    panels.append(Panel("Scales", "powers of two", extremes, note, axis="layer"))
    return [chart for panel in panels if (chart := draw(panel, figures)) is not None]
