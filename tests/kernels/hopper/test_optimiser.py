"""AdamW and the sums of squares of gradients without a GPU, in Triton's interpreter: integers, FP32
and FP64 are there what they are on a card.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when a kernel's module is loaded."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper.interpreted_optimiser"],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
