"""The checksum's kernel without a GPU, in Triton's interpreter: integers are there what they are on
a card.
"""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")


def test_in_the_interpreter(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.hopper.interpreted_checksum:main", tmp_path)
