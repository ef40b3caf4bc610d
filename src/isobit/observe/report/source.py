"""A run's directory as the report reads it: whatever is there, and a list of what is missing or
damaged.

A run that was killed leaves a torn last line and no summary; the report says so and shows the rest.
The configuration is split into what was changed from the defaults and what was not.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isobit.config.recipes import RunConfig, SftConfig
from isobit.store.directory import RunDirectory, is_held
from isobit.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has left so far."""

    root: Path
    manifest: Mapping[str, Any]
    """``run.json``; empty where it cannot be read."""
    figures: Mapping[int, Mapping[str, float | None]]
    """The figures of ``metrics.jsonl`` by step, ascending; None where one was not finite."""
    completions: tuple[Mapping[str, Any], ...]
    finished: bool
    """Whether the summary is there, which a run writes last."""
    ending: Mapping[str, Any]
    """``ending.json``: how it ended before its time; empty where it did not, or nobody said."""
    is_running: bool
    """Whether a process of this machine holds the run's lock."""
    problems: tuple[str, ...]
    """What is missing or damaged, a sentence each."""

    def setting(self, *path: str) -> Any:
        """The entry of the manifest at that path; None where there is none."""
        return entry_at(self.manifest, *path)

    @property
    def names(self) -> list[str]:
        """Every figure that the run has written, in the order of its first appearance."""
        return list(dict.fromkeys(name for figures in self.figures.values() for name in figures))


def entry_at(entry: Any, *path: str) -> Any:
    """Follow ``path`` through nested objects; None where it ends early."""
    for key in path:
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry


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
        manifest=_read_object(directory.manifest, problems),
        figures=_figures(_read_lines(directory.metrics, problems)),
        completions=tuple(_read_lines(directory.completions, problems)),
        finished=directory.summary.is_file(),
        ending=_read_ending(root / "ending.json"),
        is_running=is_held(root),
        problems=tuple(problems),
    )


def _read_ending(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
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
        lines = text.removesuffix("\n").split("\n") if text else []  # U+2028 is within a line
    except OSError:
        problems.append(f"{path.name} is missing: the page lacks what it holds")
        return []
    objects = [content for line in lines if isinstance(content := _parse(line), dict)]
    if len(objects) < len(lines):
        problems.append(
            f"{path.name}: {len(lines) - len(objects)} of {len(lines)} lines cannot be read and "
            "are left out"
        )
    return objects


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _figures(lines: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    """Training and evaluation figures of a step together; a later line replaces figures of an
    earlier one.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for line in lines:
        step = line.get("step")
        if isinstance(step, int):
            numbers = {
                name: value for name, value in line.items() if name != "step" and _is_figure(value)
            }
            steps.setdefault(step, {}).update(numbers)
    return dict(sorted(steps.items()))


def _is_figure(value: Any) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )


_MOST_CHARACTERS = 400
"""Of a value."""

Row = tuple[str, str]
"""A dotted key and its value as JSON."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A resolved configuration."""

    changed: tuple[Row, ...]
    """Keys whose values are not the defaults; empty where nobody knows the defaults."""
    others: tuple[Row, ...]


def view_settings(config: Any) -> Settings:
    """The configuration of a manifest, which may be of another version and then has only others."""
    rows = tuple(flatten(config)) if isinstance(config, dict) else ()
    changed = dict(flatten(_without_defaults(config)))
    return Settings(
        tuple(row for row in rows if row[0] in changed),
        tuple(row for row in rows if row[0] not in changed),
    )


def flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[Row]:
    """Dotted names and values, one a leaf."""
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
        except (ValidationError, ValueError, TypeError, RecursionError):
            continue
        return made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {}
