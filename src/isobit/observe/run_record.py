"""What a run has written so far: its manifest, its figures by step, its completions, how it ended.

Whatever is there is read, with a list of what is missing or damaged: a run that was killed leaves a
torn last line and no summary.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.config.precision import precision_name
from isobit.observe.completion_files import LineCompletions, TableCompletions
from isobit.observe.growing_file import GrowingFile
from isobit.store.directory import RunDirectory
from isobit.store.journals import parsed_line
from isobit.store.lock import is_held
from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain, read_plain


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
    def flow(self) -> str | None:
        """The preset with its options; None where the manifest has none."""
        table = self.setting("config", "precision")
        return precision_name(table) if isinstance(table, dict) and "preset" in table else None

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
        content = json.loads(read_plain(path))
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
        text = read_plain(path, largest=None).decode("utf-8", "replace")
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


"""Bytes; a longer line is left out."""
TAIL = 1 << 18
"""Bytes at the end of ``metrics.jsonl`` that the list of runs reads."""


class GrowingFigures(GrowingFile):
    """The figures of ``metrics.jsonl`` by step, as ``RunRecord`` has them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.steps: dict[int, dict[str, float | None]] = {}

    def _take(self, at: int, content: dict[str, Any]) -> None:
        add_figures(self.steps, content)

    def _clear(self) -> None:
        self.steps = {}


def last_figures(path: Path) -> dict[int, dict[str, float | None]]:
    """The figures in the last lines of a file, which may be long; none where there is no file."""
    steps: dict[int, dict[str, float | None]] = {}
    with suppress(OSError), open_plain(path, follow_links=False) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        for line in file.read(TAIL).split(b"\n"):
            if (content := parsed_line(line)) is not None:
                add_figures(steps, content)
    return steps


class WatchedRun:
    """A run's directory and what was read of it so far."""

    def __init__(self, root: Path) -> None:
        directory = RunDirectory(root)
        self.root, self._directory = root, directory
        self.figures = GrowingFigures(directory.metrics)
        self.samples = LineCompletions(directory.completions)
        self.kept = TableCompletions(directory.kept_completions)

    def record(self) -> RunRecord:
        """What the report reads, without completions, after one more look at the figures."""
        self.figures.look()
        problems = list[str]()
        if self.figures.damaged:
            problems.append(f"metrics.jsonl: {self.figures.damaged} lines cannot be read")
        return record_of(self.root, self.figures.steps, problems)


def record_of(
    root: Path, steps: Mapping[int, Mapping[str, float | None]], problems: list[str]
) -> RunRecord:
    """The record of a run with these figures and no completions.  ``problems`` may grow."""
    directory = RunDirectory(root)
    return RunRecord(
        root=root,
        manifest={}
        if directory.manifest.is_symlink()
        else read_object(directory.manifest, problems),
        figures=dict(sorted(steps.items())),
        completions=(),
        finished=directory.summary.is_file(),
        ending={} if directory.ending.is_symlink() else read_object(directory.ending, []),
        is_running=is_held(root),
        problems=tuple(problems),
    )
