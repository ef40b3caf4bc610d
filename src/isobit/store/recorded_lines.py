"""The lines of a run's files that only grow, read to be compared, whatever has become of them."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path, position: int = 0) -> list[dict[str, Any] | None]:
    """The lines from byte ``position`` on, in order, none where there is no file; None for one that
    is damaged, and no JSON object.  Raises OSError.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(position)
        return [_parsed(line) for line in file]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
