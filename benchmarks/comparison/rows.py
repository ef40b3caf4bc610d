"""Rows of results as JSON lines: each says which card and which versions it comes from, and is on
disk before the next one starts.
"""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class RowWriter:
    """Appends rows to ``DIR/<engine>-<mode>-<shape>.jsonl`` and prints them; ``common`` is part of
    each.
    """

    def __init__(
        self, directory: Path, engine: str, mode: str, shape: str, card: Row, versions: Row
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{engine}-{mode}-{shape}.jsonl"
        self._common: Row = {
            "engine": engine,
            "mode": mode,
            "shape": shape,
            "card": card,
            "versions": versions,
        }

    def write(self, **row: Any) -> None:
        """One measurement."""
        line = json.dumps(self._common | row)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(
            json.dumps({"engine": self._common["engine"], "mode": self._common["mode"]} | row),
            flush=True,
        )


def read_rows(directory: Path) -> list[Row]:
    """All rows of a folder, in the order of the files' names and of their lines; curves are kept as
    ``.jsonl.gz``.
    """
    return [
        json.loads(line)
        for path in sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.gz")])
        for line in _text(path).splitlines()
    ]


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def card_memory_gib() -> float:
    """What all processes together hold of the card: it includes what an engine has set aside for
    its cache.
    """
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024  # noqa: S603
