"""Runs that were made again, on another day or card, beside the first: the same bytes?

    ROWS/repeats/TASK-ARM-SEED.json.xz      a row: of either run
    ROWS/repeats/TASK-ARM-SEED.jsonl.xz     metrics.jsonl of a run that was lost before its row

What is compared of rows is what a run leaves but times: the digest of all completions and rewards,
the figures of every step, the held-out rewards, and the final weights.  Another recipe, start or
input is said, too: that is no repeat.  Of a run that was lost, it is the figures of its steps.
"""

import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arms import settings
from benchmarks.arms.rows import REPEATS, SUFFIX, Row, columns_of, name_of, read_row

LOST = ".jsonl.xz"

_MAY_DIFFER = ("device.", "versions.", "bits.")
"""Settings of another machine."""
_PARTS: dict[str, Callable[[Row], Any]] = {
    "settings": lambda row: {
        name: value
        for name, value in settings.flat(row).items()
        if not name.startswith(_MAY_DIFFER)
    },
    "completions and rewards": lambda row: row["completions"],
    "figures of the steps": lambda row: _but_times(row["steps"]),
    "held-out rewards": lambda row: [(one["step"], one["rewards"]) for one in row["evaluations"]],
    "final weights": lambda row: row["final"],
}


@dataclass(frozen=True, slots=True)
class Repeats:
    """What is kept of runs that were made twice, beside the rows."""

    rows: Sequence[Row] = ()
    lost: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    """A run's name -> ``steps`` as in a row, up to where the run was lost."""


def read(directory: Path) -> Repeats:
    """Whatever lies in ``repeats``, at any depth.  Raises ValueError for what cannot be read."""
    found = directory / REPEATS
    return Repeats(
        [read_row(path) for path in sorted(found.rglob(f"*{SUFFIX}"))],
        {
            path.name.removesuffix(LOST): columns_of(_lines(path))
            for path in sorted(found.rglob(f"*{LOST}"))
        },
    )


def differing_parts(first: Row, second: Row) -> list[str]:
    """What is not the same in both, in words; empty where all is."""
    return [name for name, part in _PARTS.items() if part(first) != part(second)]


def notes(rows: Iterable[Row], again: Repeats) -> Iterator[str]:
    """How many of the repeats of these rows have the same bytes, where there are any."""
    first = {name_of(row): row for row in rows}
    yield from _of_rows(first, again.rows)
    yield from _of_lost(first, again.lost)


def _of_rows(first: Mapping[str, Row], again: Iterable[Row]) -> Iterator[str]:
    pairs = [(first[name_of(row)], row) for row in again if name_of(row) in first]
    found = [(one, two, differing_parts(one, two)) for one, two in pairs]
    if not found:
        return
    same = [one for one, _, parts in found if not parts]
    yield (
        f"Repeated on another day or card: {len(same)} of {len(found)} the same bytes "
        "(completions, rewards, figures of every step, final weights)."
    )
    for one, two, parts in found:
        if parts:
            where = f"{_where(one)}; again: {_where(two)}"
            yield f"{name_of(two)} ({where}) has other: {', '.join(parts)}."


def _of_lost(
    first: Mapping[str, Row], lost: Mapping[str, Mapping[str, list[Any]]]
) -> Iterator[str]:
    found = {name: steps for name, steps in lost.items() if name in first}
    if not found:
        return
    other = [
        name for name, steps in found.items() if _beginning(first[name], steps) != _but_times(steps)
    ]
    steps = sum(len(found[name]["step"]) for name in found if name not in other)
    yield (
        f"Made once more and lost before its row: {len(found) - len(other)} of {len(found)} with "
        f"the same figures in every step ({steps:,} steps)."
    )
    for name in other:
        yield f"{name} has other figures of the steps than the run that was lost."


def _beginning(row: Row, steps: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The row's figures of as many steps."""
    count = len(steps["step"])
    return {name: column[:count] for name, column in _but_times(row["steps"]).items()}


def _but_times(steps: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: column for name, column in steps.items() if not name.startswith("time/")}


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    except (lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path} is no metrics.jsonl in xz ({error}): copy it again") from error


def _where(row: Row) -> str:
    """Day and machine."""
    device = row["run"]["device"]
    return f"{row['run']['started'][:10]}, {device.get('model') or device['type']}"
