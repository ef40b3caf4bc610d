"""Rows given from Python: a configuration holds their number and digest, this module the rows.

So the configuration stays one that can be written down and compared: a run that is resumed with
other rows differs in ``sha256``, and is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from isobit.errors import DataError


class GivenRows:
    """Rows, found by their digest for as long as somebody holds this object."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
        self.sha256 = digest.hexdigest()


_GIVEN: WeakValueDictionary[str, GivenRows] = WeakValueDictionary()


def give_rows(rows: Iterable[Any], key: str) -> GivenRows:
    """Rows for the table ``key`` of a recipe; whoever starts the run holds what is returned.

    Raises DataError for what are not rows.
    """
    found = list(rows)
    for place, row in enumerate(found):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"{key}: row {place} is {type(row).__name__} {row!r:.60}; expected a list of "
                "mappings from column to value, such as [{'prompt': '3+4=', 'answer': '7'}] (of a "
                "DataFrame: frame.to_dict('records'))"
            )
    made = GivenRows(found)
    return _GIVEN.setdefault(made.sha256, made)


def given_rows(sha256: str, count: int) -> Sequence[Mapping[str, Any]]:
    """The rows with a digest.  Raises DataError where nobody holds them."""
    found = _GIVEN.get(sha256)
    if found is None:
        raise DataError(
            f"the data are {count} rows that were given from Python, which only a call from Python "
            "can give again: isobit.train(.., data=rows, resume=True); or write them into a file, "
            "and name it"
        )
    return found.rows


def _plain(value: Any) -> Any:
    """Of what JSON does not know: the elements of an array or a set, the text of all else."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value.tolist() if hasattr(value, "tolist") else str(value)
