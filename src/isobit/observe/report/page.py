"""The page: everything that the template needs, put through it, and written as a whole.

Text from prompts, completions, configurations and file names is escaped by the template engine,
never by hand; characters that are invisible or could change the direction of the text are replaced
by visible ones before that.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isobit
from isobit.observe.report.axis import duration_text, number_text
from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.panels import build_sections, evaluation_sets
from isobit.observe.report.samples import SHADES, choose_samples
from isobit.observe.report.source import RunRecord, read_run
from isobit.observe.report.template import render_template, write_page

MARKER = "<!doctype html>\n<!-- isobit report -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""

_MOST_CHARACTERS = 400
"""Of a value of the configuration."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure on top of the page."""

    label: str
    value: str
    detail: str


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its directory as ``report.html``; -> where it is.

    Raises ConfigError for a directory that is no run's, or where the page cannot be written.
    """
    return write_page(render(read_run(root)), out or root / "report.html", MARKER)


def render(record: RunRecord) -> str:
    """The page as text."""
    page = render_template(
        "report.html",
        record=record,
        name=record.root.resolve().name,
        state=_state(record),
        started=str(record.setting("started") or "").replace("T", " ").replace("+00:00", " UTC"),
        tiles=_tiles(record),
        sections=build_sections(record),
        flow=view_flow(record),
        sources=choose_samples(record.completions),
        shades=SHADES,
        settings=list(_flatten(record.setting("config") or {})),
        environment=list(
            _flatten(
                {
                    key: record.setting(key)
                    for key in ("started", "device", "versions", "model", "data")
                }
            )
        ),
        version=isobit.__version__,
    )
    return f"{MARKER}\n{page}\n"


def _state(record: RunRecord) -> str:
    steps = record.setting("config", "training", "steps")
    done = max(
        (
            step
            for step, row in record.figures.items()
            if any(not name.startswith(("eval/", "time/")) for name in row)
        ),
        default=0,
    )
    of = f"{done} of {steps} steps" if isinstance(steps, int) else f"{done} steps"
    return (
        f"finished, {of}"
        if record.finished
        else f"not finished (still running, or stopped): {of} so far"
    )


def _tiles(record: RunRecord) -> list[Tile]:
    tiles = [_accuracy_tile(record, name) for name in evaluation_sets(record.names)[:3]]
    compared, differing = (
        _total(record, "log_prob_diff/tokens_compared"),
        _total(record, "log_prob_diff/tokens_differing"),
    )
    if compared:
        value = "0" if not differing else f"{100 * differing / compared:.3g}%"
        tiles.append(
            Tile(
                "log-probabilities that differ",
                value,
                f"{differing:,.0f} of {compared:,.0f} in rollout and training",
            )
        )
    routed = _total(record, "routing_diff/tokens_compared")
    if routed:
        others = _total(record, "routing_diff/tokens_differing")
        tiles.append(
            Tile(
                "routings that differ",
                "0" if not others else f"{100 * others / routed:.3g}%",
                f"{others:,.0f} of {routed:,.0f} in rollout and training",
            )
        )
    rewards = [
        value for row in record.figures.values() if (value := row.get("reward/mean")) is not None
    ]
    if rewards:
        tiles.append(
            Tile(
                "training reward",
                number_text(rewards[-1]),
                f"mean of the last step; {number_text(rewards[0])} in the first",
            )
        )
    phases = {
        name: _total(record, f"time/{name}_s")
        for name in ("rollout", "training", "grading", "evaluation")
    }
    if sum(phases.values()):
        detail = ", ".join(
            f"{name} {duration_text(seconds)}"
            for name, seconds in phases.items()
            if seconds >= 0.05
        )
        tiles.append(Tile("time", duration_text(sum(phases.values())), detail))
    return tiles


def _accuracy_tile(record: RunRecord, name: str) -> Tile:
    rows = [row for row in record.figures.values() if row.get(f"eval/{name}/accuracy") is not None]
    if not rows:
        return Tile(f"{name} accuracy", number_text(None), "no evaluation has a figure")
    first, last = rows[0], rows[-1]
    accuracy = [row[f"eval/{name}/accuracy"] or 0.0 for row in (first, last)]
    percent = all(0.0 <= value <= 1.0 for value in accuracy)
    low, high = (last.get(f"eval/{name}/{side}") for side in ("low", "high"))
    interval = (
        f"95% interval {number_text(low, percent)} to {number_text(high, percent)}, "
        if low is not None and high is not None
        else ""
    )
    before = "" if len(rows) == 1 else f"from {number_text(accuracy[0], percent)}; "
    return Tile(
        f"{name} accuracy" if percent else f"{name} mean reward",
        number_text(accuracy[1], percent),
        f"{before}{interval}{number_text(last.get(f'eval/{name}/problems'))} problems",
    )


def _total(record: RunRecord, metric: str) -> float:
    return sum(row.get(metric) or 0.0 for row in record.figures.values())


def _flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values as JSON, one a leaf."""
    for key, value in entry.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{path}.")
        elif value is not None or above:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield (
                path,
                text
                if len(text) <= _MOST_CHARACTERS
                else f"{text[:_MOST_CHARACTERS]} [{len(text) - _MOST_CHARACTERS} more characters]",
            )
