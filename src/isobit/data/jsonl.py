"""JSON Lines: one object a line, UTF-8.  Every fault is named by file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobit.errors import DataError


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of ``path`` with their line numbers from 1; blank lines are skipped, a byte order
    mark is allowed.

    Raises ``DataError`` for a file that cannot be read, bytes that are not UTF-8, and a line that
    is not one JSON object.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a JSONL file") from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}, column {error.colno}: not JSON ({error.msg}); expected one object a line"
        ) from error
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value
