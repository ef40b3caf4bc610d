"""Reads a run's directory for the report: whatever is there, and a list of what is missing or
damaged.  A run that was killed leaves a torn last line and no summary.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.config.recipes import RunConfig, SftConfig
from isobit.store.directory import RunDirectory, is_held
from isobit.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has written so far."""

    root: Path
    manifest: Mapping[str, Any]
    """``run.json``; empty where it cannot be read."""
    figures: Mapping[int, Mapping[str, float | None]]
    """The figures of ``metrics.jsonl`` by step, ascending; None where one was not finite."""
    completions: tuple[Mapping[str, Any], ...]
    finished: bool
    """Whether the summary is there, which a run writes last."""
    ending: Mapping[str, Any]
    """``ending.json``: how a run that was stopped early ended; otherwise empty."""
    is_running: bool
    """Whether a process of this machine holds the run's lock."""
    problems: tuple[str, ...]
    """What is missing or damaged, one sentence each."""

    def setting(self, *path: str) -> Any:
        """The entry of the manifest at that path; None where there is none."""
        entry: Any = self.manifest
        for key in path:
            entry = entry.get(key) if isinstance(entry, dict) else None
        return entry

    @property
    def names(self) -> list[str]:
        """Every figure that the run has written, in the order of its first appearance."""
        return list(dict.fromkeys(name for figures in self.figures.values() for name in figures))

    def values(self, metric: str) -> list[float]:
        """A figure of each step that has it, in the order of the steps."""
        rows = self.figures.values()
        return [value for row in rows if (value := row.get(metric)) is not None]

    def total(self, metric: str) -> float:
        """The sum of a figure over all steps."""
        return sum(self.values(metric))


def read_run(root: Path) -> RunRecord:
    """Read a run's directory.  Raises ConfigError for a path that is none."""
    directory = RunDirectory(root)
    if not directory.manifest.is_file() and not directory.metrics.is_file():
        what = (
            "holds neither run.json nor metrics.jsonl"
            if root.is_dir()
            else "is a file"
            if root.is_file()
            else "does not exist"
        )
        raise ConfigError(
            f"{str(root)!r} is no run: it {what}; name the directory that `isobit train` wrote "
            "(its `output`)"
        )
    problems: list[str] = []
    return RunRecord(
        root=root,
        manifest=read_object(directory.manifest, problems),
        figures=_figures(_read_lines(directory.metrics, problems)),
        completions=tuple(_read_lines(directory.completions, problems)),
        finished=directory.summary.is_file(),
        ending=read_object(root / "ending.json", []),
        is_running=is_held(root),
        problems=tuple(problems),
    )


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object of a JSON file; where there is none an empty one, and a sentence more among the
    problems.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        problems.append(f"{path.name} is missing: the page lacks what it holds")
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        problems.append(f"{path.name} is damaged: the page lacks what it holds")
        return {}
    return content


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file; lines that are none are counted and left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        problems.append(f"{path.name} is missing: the page lacks what it holds")
        return []
    lines = text.removesuffix("\n").split("\n") if text else []  # a line may contain U+2028
    objects: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(content := json.loads(line), dict):
                objects.append(content)
    if len(objects) < len(lines):
        problems.append(
            f"{path.name}: {len(lines) - len(objects)} of {len(lines)} lines cannot be read and "
            "are left out"
        )
    return objects


def _figures(lines: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    steps: dict[int, dict[str, float | None]] = {}
    for line in lines:
        add_figures(steps, line)
    return dict(sorted(steps.items()))


def add_figures(steps: dict[int, dict[str, float | None]], line: Mapping[str, Any]) -> None:
    """Add the finite numbers and nulls of a line to those of its step, training and evaluation
    together; a later line replaces figures of an earlier one.
    """
    step = line.get("step")
    if isinstance(step, int):
        row = steps.setdefault(step, {})
        for name, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name != "step" and (value is None or (is_number and math.isfinite(value))):
                row[name] = value


_MOST_CHARACTERS = 400
"""Shown of a value."""

Row = tuple[str, str]
"""A dotted key and its value as JSON."""


def view_settings(config: Any) -> tuple[list[Row], list[Row]]:
    """The keys of a manifest's configuration that differ from the defaults, and all others.  The
    configuration may be another version's, whose defaults are not known: then none has changed.
    """
    rows = list(flatten(config)) if isinstance(config, dict) else []
    changed = dict(flatten(_without_defaults(config)))
    return (
        [row for row in rows if row[0] in changed],
        [row for row in rows if row[0] not in changed],
    )


def flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[Row]:
    """Dotted names and values, one row per leaf."""
    for key, value in entry.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{path}.")
        elif value is not None or above:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            more = len(text) - _MOST_CHARACTERS
            yield path, text if more <= 0 else f"{text[:_MOST_CHARACTERS]} [{more} more characters]"


def _without_defaults(config: Any) -> dict[str, Any]:
    for schema in (RunConfig, SftConfig):
        try:
            made = schema.model_validate(config)
        except (ValueError, TypeError, RecursionError):  # ValidationError is a ValueError
            continue
        return made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {}
