"""Triton's interpreter, for what is the same there as on a card."""

import os
from pathlib import Path

from tests.forked import ran


def run_interpreted(name: str, folder: Path) -> None:
    """``MODULE:FUNCTION`` in a new process, since Triton chooses the interpreter at import."""
    done = ran(name, folder, environ=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
