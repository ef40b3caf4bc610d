"""From the qkv GEMM to attention and back: the bits of the specification, where Triton interprets
the kernels.
"""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed: kernels are not interpreted")


def test_the_bits_are_those_of_the_specification(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.hopper.interpreted_qkv:main", tmp_path)
