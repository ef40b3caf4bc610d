"""In which settings the rows of a task were made: what all share, what an arm changes, and what
should be the same and is not.

Paths, the seed, what is measured and the memory that an engine is given (no bit depends on it) are
no settings.  Each is a dotted name and its value: ``config.training.steps``,
``start.model.safetensors``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arms.rows import Row
from isobit.observe.report.source import flatten

_PARTS = ("config", "inputs", "device", "versions", "bits")
"""Of run.json."""
_OWN = ("config.seed", "config.model", "config.output", "config.rollout.kv_memory_gib")

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the rows of one task."""

    shared: dict[str, str]
    by_arm: dict[str, dict[str, str]]
    """Name -> arm -> value; empty where the arm has no such key."""
    mixed: dict[str, tuple[str, ...]]
    """The values of what differs without an arm's doing."""


def settings_of(rows: Sequence[Row]) -> Settings:
    """Whatever differs between rows of one arm is ``mixed``."""
    found = [(row["arm"], flat(row)) for row in rows]
    names = dict.fromkeys(name for _, one in found for name in one)
    shared: dict[str, str] = {}
    by_arm: dict[str, dict[str, str]] = {}
    mixed: dict[str, tuple[str, ...]] = {}
    for name in names:
        values = [(arm, one.get(name, "")) for arm, one in found]
        different = tuple(dict.fromkeys(value for _, value in values))
        if len(different) == 1:
            shared[name] = different[0]
        elif len(dict.fromkeys(values)) == len({arm for arm, _ in values}) and _may(name):
            by_arm[name] = dict(values)
        else:
            mixed[name] = different
    return Settings(shared, by_arm, mixed)


def flat(row: Row) -> dict[str, str]:
    """The settings of one row."""
    parts = {part: row["run"].get(part, {}) for part in _PARTS}
    found = dict(flatten({**parts, "start": row["start"]}))
    return {
        name: value
        for name, value in found.items()
        if name not in _OWN and not (name.startswith("config.data.") and name.endswith(".path"))
    }


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the task's table has to know."""
    mixed = settings_of(rows).mixed
    texts = [f"{name} ({', '.join(map(_short, mixed[name]))})" for name in mixed]
    return [f"Not the same in all rows: {'; '.join(texts)}."] if texts else []


def _short(value: str) -> str:
    """Of a SHA-256 the first digits."""
    return value[:8] if _SHA256.fullmatch(value) else value or "none"


def _may(name: str) -> bool:
    """An arm changes the recipe; data, machine and start are the same for all."""
    return name.startswith("config.")
