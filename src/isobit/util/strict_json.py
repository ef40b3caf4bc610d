"""JSON as every reader takes it: what this project writes into files, pipes and answers, and its
lines read again.

Python's own writer makes of a number that is not finite a bare ``NaN`` or ``Infinity``, which are
no JSON and at which other readers stop, and a missing number of a table is such a one. Here they
are null, at any depth. Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is an
escape; so are the characters besides the line feed at which some readers end a line.

``json.dumps`` itself is left for digests, whose bytes must stay as they are, and for messages
between this project's own processes.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\u0085\u2028\u2029"}
Default = Callable[[Any], Any]


def json_text(
    content: Any, *, indent: int | None = None, default: Default | None = None, ascii: bool = False
) -> str:
    """The JSON of ``content``; ``default`` is asked for what JSON does not know, and ``ascii``
    escapes all other characters. Raises TypeError for what neither knows.
    """
    try:
        text = _dumped(content, indent, default, ascii)
    except (ValueError, TypeError):  # a number that is not finite, or a key that is no text
        text = _dumped(_strict(content, default), indent, default, ascii)
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode().translate(_LINE_ENDS)


def json_line(
    record: Mapping[str, Any], default: Default | None = None, *, ascii: bool = False
) -> bytes:
    """A record of a JSONL file, with its line end. Raises as ``json_text`` does."""
    return f"{json_text(record, default=default, ascii=ascii)}\n".encode()


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """A line's JSON object; None where it is damaged, or is something else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _dumped(content: Any, indent: int | None, default: Default | None, ascii: bool) -> str:
    return json.dumps(content, indent=indent, default=default, ensure_ascii=ascii, allow_nan=False)


def _strict(content: Any, default: Default | None) -> Any:
    """A copy with None for numbers that are not finite, and text for keys."""
    match content:
        case float():
            return content if math.isfinite(content) else None
        case dict():
            return {
                key if isinstance(key, str | int | None) else str(key): _strict(value, default)
                for key, value in content.items()
            }
        case list() | tuple():
            return [_strict(one, default) for one in content]
        case None | str() | int():
            return content
    return content if default is None else _strict(default(content), default)
