"""JSON Lines: one object a line, UTF-8.  Every fault is named by file and line, also what Python's
reader takes in silence: a key that is there twice, of which it keeps the last.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from isobit.errors import DataError

LONGEST_LINE = 1 << 26
"""Bytes.  What has no end of a line, a device or a binary file, would fill the memory."""


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of ``path`` with their line numbers from 1; blank lines are skipped, a byte order
    mark is allowed.

    Raises ``DataError`` for a file that cannot be read, bytes that are not UTF-8, and a line that
    is not one JSON object.
    """
    try:
        with path.open("rb") as lines:
            for number in count(1):
                line = lines.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{path}, line {number}: longer than {LONGEST_LINE:,} bytes; expected one "
                        "object a line"
                    )
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot read {path}: {reason}; expected a JSONL file") from error


class _TwiceError(Exception):
    """A key that is in one object twice."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return made


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object_of)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}, column {error.colno}: not JSON ({error.msg}); expected one object a line"
        ) from error
    except _TwiceError as error:
        raise DataError(f"{place}: the key {error.args[0]!r} is there twice") from None
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply") from error
    except ValueError as error:  # Python converts no integer of more than some thousand digits
        raise DataError(f"{place}: a number has too many digits; write it as text") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value
