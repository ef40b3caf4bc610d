"""AdamW and the sums of squares of gradients without a GPU, in Triton's interpreter: integers, FP32
and FP64 are there what they are on a card.
"""

import os
from pathlib import Path

import pytest

from tests.forked import called

pytest.importorskip("triton", reason="Triton is not installed")


def test_in_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    process = called(
        "tests.kernels.hopper.interpreted_optimiser:main",
        tmp_path / "log",
        environ=os.environ | {"TRITON_INTERPRET": "1"},
    )
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()
