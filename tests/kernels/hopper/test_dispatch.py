"""What routes and sorts tokens for their experts, without a GPU, in Triton's interpreter: integers
and FP32 are there what they are on a card.
"""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")


def test_in_the_interpreter(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.hopper.interpreted_dispatch:main", tmp_path)
