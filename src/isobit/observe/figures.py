"""The figures of ``metrics.jsonl``, by column: 8 bytes a step and metric."""

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobit.observe.growing_file import GrowingFile
from isobit.util.plain_files import open_plain
from isobit.util.strict_json import parsed_line

Column = NDArray[Any]
"""A number for each step, or for each point of a chart."""

ABSENT, NULL = float("nan"), float("inf")
"""The entries of a column for a step without the metric, and for a value that was not finite."""
_LARGEST = 1e308
MOST_NAMES = 2000
"""Metrics of a run that are read; further names are left out."""
TAIL = 1 << 18
"""Bytes at the end of ``metrics.jsonl`` that the list of runs reads."""


class Figures(Mapping[int, Mapping[str, float | None]]):
    """The figures of each step, ascending; None where one was not finite."""

    def __init__(self, steps: Column, columns: Mapping[str, Column]) -> None:
        """``columns`` may be shorter than ``steps``: later steps then lack the metric."""
        self.steps = steps
        self.derived: dict[str, Column] = {}
        """[steps] what was computed of the figures, by name."""
        self._columns = columns

    @classmethod
    def of_rows(cls, rows: Mapping[int, Mapping[str, float | None]]) -> "Figures":
        """The figures of rows by step."""
        steps = sorted(rows)
        names = dict.fromkeys(chain.from_iterable(rows[step] for step in steps))
        columns = {
            name: np.array(
                [
                    NULL if (value := rows[step].get(name, ABSENT)) is None else value
                    for step in steps
                ]
            )
            for name in names
        }
        return cls(np.array(steps, np.int64), columns)

    def __getitem__(self, step: int) -> dict[str, float | None]:
        row = int(np.searchsorted(self.steps, step))
        if row == len(self.steps) or self.steps[row] != step:
            raise KeyError(step)
        values = ((name, float(c[row])) for name, c in self._columns.items() if row < len(c))
        return {name: None if value == NULL else value for name, value in values if value == value}

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps.tolist())

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of its first appearance."""
        return list(self._columns)

    def column(self, name: str) -> Column:
        """[steps] a metric, with ``ABSENT`` and ``NULL``."""
        column = self._columns.get(name, np.empty(0))
        missing = len(self.steps) - len(column)
        return np.append(column, np.full(missing, ABSENT)) if missing else column

    def values_of(self, name: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        column = self._columns.get(name, np.empty(0))
        return column[np.isfinite(column)].tolist()

    def with_column(self, name: str, column: Column) -> "Figures":
        """The figures with one metric more."""
        return Figures(self.steps, {**self._columns, name: column})

    def last_step(self, names: Iterable[str]) -> int:
        """The last step that has any of the metrics, finite or not; 0 for none."""
        rows = (np.flatnonzero(~np.isnan(self._columns[name])) for name in names)
        return max((int(self.steps[known[-1]]) for known in rows if len(known)), default=0)

    def between(self, first: float, last: float) -> "Figures":
        """Those of the steps from ``first`` to ``last``, both included."""
        low, high = np.searchsorted(self.steps, first), np.searchsorted(self.steps, last, "right")
        if (low, high) == (0, len(self.steps)):
            return self
        columns = {name: column[low:high] for name, column in self._columns.items()}
        known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
        return Figures(self.steps[low:high], known)


class GrowingFigures(GrowingFile):
    """The figures of a file that grows; a later line of a step replaces those of an earlier one."""

    def _clear(self) -> None:
        self._rows: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._figures: Figures | None = None

    def _take(self, at: int, content: dict[str, Any]) -> None:
        step = content.pop("step", None)
        if not isinstance(step, int) or abs(step) >= 1 << 53:
            return
        self._figures = None
        row = self._rows.setdefault(step, len(self._rows))
        columns = self._columns
        for name, value in content.items():
            if value is None:
                value = NULL
            elif type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
                continue
            column = columns.get(name)
            if column is None:
                if len(columns) == MOST_NAMES:
                    continue
                column = columns[name] = array("d")
            missing = row - len(column)
            if missing < 0:
                column[row] = value
            else:
                column.extend(repeat(ABSENT, missing))
                column.append(value)

    @property
    def figures(self) -> Figures:
        """The figures that were read so far."""
        if self._figures is None:
            steps = np.fromiter(self._rows, np.int64, len(self._rows))
            found = Figures(steps, {name: np.array(c) for name, c in self._columns.items()})
            if (np.diff(steps) < 0).any():
                order = np.argsort(steps)
                columns = {name: found.column(name)[order] for name in found.names}
                found = Figures(steps[order], columns)
            self._figures = found
        return self._figures


def last_figures(path: Path) -> Figures:
    """The figures in the last lines of a file, which may be long; none where there is no file."""
    tail = GrowingFigures(path)
    with suppress(OSError), open_plain(path, follow_links=False) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        for line in file.read(TAIL).split(b"\n"):
            if (content := parsed_line(line)) is not None:
                tail._take(0, content)
    return tail.figures
