"""The files of a run so far: its manifest, its figures by step, its completions, how it ended.

Whatever is there is read, with a list of what is missing or damaged: a run that was killed leaves a
torn last line and no summary.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobit.config.precision import precision_name
from isobit.config.recipes import recorded_recipe
from isobit.observe.completion_files import LineCompletions, TableCompletions
from isobit.observe.figures import Figures, GrowingFigures
from isobit.observe.growing_file import GrowingLines
from isobit.store.directory import RunDirectory
from isobit.store.lock import is_held
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run's files so far."""

    root: Path
    manifest: Mapping[str, Any]
    """``run.json``; empty where it cannot be read."""
    figures: Figures
    completions: tuple[Mapping[str, Any], ...]
    finished: bool
    """Whether the summary is there, which a run writes last."""
    ending: Mapping[str, Any]
    """``ending.json``: how a run that was stopped early ended; otherwise empty."""
    is_running: bool
    """Whether a process of this machine holds the run's lock."""
    problems: tuple[str, ...]
    """A sentence on each file that is missing or damaged."""

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
        """Every metric that the run has written, in the order of its first appearance."""
        return self.figures.names

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        return self.figures.values_of(metric)

    def total(self, metric: str) -> float:
        """The sum of a metric over all steps."""
        column = self.figures.column(metric)
        return float(column[np.isfinite(column)].sum())

    def steps_of(self, metric: str) -> list[int]:
        """The steps with a finite value of a metric."""
        return self.figures.steps[np.isfinite(self.figures.column(metric))].tolist()

    def evaluation_sets(self, figure: str = "accuracy") -> list[str]:
        """The evaluation sets that have ``figure``."""
        pattern = re.compile(rf"eval/(?P<name>.+)/{figure}", re.DOTALL)
        return [match["name"] for name in self.names if (match := pattern.fullmatch(name))]

    def is_accuracy(self, name: str) -> bool:
        """Whether every reward of a set was 0 or 1, so that their mean is an accuracy."""
        values = self.values(f"eval/{name}/accuracy")
        return f"eval/{name}/right" not in self.names and all(0 <= value <= 1 for value in values)


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
    manifest = read_object(directory.manifest, problems)
    figures = GrowingFigures(directory.metrics, follow_links=True)
    completions = GrowingLines(directory.completions, follow_links=True)
    figures.read_whole(problems)
    completions.read_whole(problems)
    return _record(root, manifest, figures.figures, problems, completions.objects)


def _record(
    root: Path,
    manifest: Mapping[str, Any],
    figures: Figures,
    problems: Sequence[str],
    completions: Sequence[Mapping[str, Any]] = (),
    follow_links: bool = True,
) -> RunRecord:
    directory = RunDirectory(root)
    is_link = not follow_links and directory.ending.is_symlink()
    if isinstance(recipe := manifest.get("config"), dict):
        manifest = {**manifest, "config": recorded_recipe(recipe)}
    return RunRecord(
        root=root,
        manifest=manifest,
        figures=figures,
        completions=tuple(completions),
        finished=directory.summary.is_file(),
        ending={} if is_link else read_object(directory.ending, []),
        is_running=is_held(root),
        problems=tuple(problems),
    )


def record_of(root: Path, figures: Figures, problems: Sequence[str] = ()) -> RunRecord:
    """The record of a run with these figures and no completions; links are not followed."""
    path, found = RunDirectory(root).manifest, list(problems)
    manifest = {} if path.is_symlink() else read_object(path, found)
    return _record(root, manifest, figures, found, follow_links=False)


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


class WatchedRun:
    """A run's directory and what was read of it so far."""

    def __init__(self, root: Path) -> None:
        directory = RunDirectory(root)
        self.root = root
        self.figures = GrowingFigures(directory.metrics)
        self.samples = LineCompletions(directory.completions)
        self.kept = TableCompletions(directory.kept_completions)

    def record(self) -> RunRecord:
        """The record without completions, after one more look at the figures."""
        self.figures.look()
        damaged = self.figures.damaged
        problems = [f"metrics.jsonl: {damaged} lines cannot be read"] if damaged else []
        return record_of(self.root, self.figures.figures, problems)
