"""A record as a line of a JSONL file, in UTF-8: text as it stands, but half of a surrogate pair,
which JSON can hold and UTF-8 cannot, as an escape.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any


def json_line(record: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """The record with a line end; ``default`` is asked for what JSON does not know."""
    try:
        return _dumped(record, default, ensure_ascii=False)
    except UnicodeEncodeError:
        return _dumped(record, default, ensure_ascii=True)


def _dumped(
    record: Mapping[str, Any], default: Callable[[Any], Any] | None, ensure_ascii: bool
) -> bytes:
    text = json.dumps(record, ensure_ascii=ensure_ascii, default=default)
    return f"{text}\n".encode()
