"""Triton's interpreter, for what is the same there as on a card."""

import os
from pathlib import Path

from tests.forked import called


def run_interpreted(name: str, folder: Path) -> None:
    """``MODULE:FUNCTION`` in a process of its own: the interpreter is chosen when Triton is
    imported.
    """
    process = called(name, folder / "log", environ=os.environ | {"TRITON_INTERPRET": "1"})
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()
