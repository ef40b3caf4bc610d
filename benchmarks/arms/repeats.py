"""Runs that were made again, on another day or card, beside the first: the same bytes?

What is compared is what a run leaves but times: the digest of all completions and rewards, the
figures of every step, the held-out rewards, and the final weights.  Another recipe, start or input
is said, too: that is no repeat.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.arms import settings
from benchmarks.arms.rows import Row, name_of

_MAY_DIFFER = ("device.", "versions.", "bits.")
"""Settings of another machine."""
_PARTS: dict[str, Callable[[Row], Any]] = {
    "settings": lambda row: {
        name: value
        for name, value in settings.flat(row).items()
        if not name.startswith(_MAY_DIFFER)
    },
    "completions and rewards": lambda row: row["completions"],
    "figures of the steps": lambda row: {
        name: column for name, column in row["steps"].items() if not name.startswith("time/")
    },
    "held-out rewards": lambda row: [(one["step"], one["rewards"]) for one in row["evaluations"]],
    "final weights": lambda row: row["final"],
}


def differing_parts(first: Row, second: Row) -> list[str]:
    """What is not the same in both, in words; empty where all is."""
    return [name for name, part in _PARTS.items() if part(first) != part(second)]


def notes(rows: Iterable[Row], again: Iterable[Row]) -> Iterator[str]:
    """How many of the repeats of these rows have the same bytes, where there are any."""
    first = {name_of(row): row for row in rows}
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


def _where(row: Row) -> str:
    """Day and machine."""
    device = row["run"]["device"]
    return f"{row['run']['started'][:10]}, {device.get('model') or device['type']}"
