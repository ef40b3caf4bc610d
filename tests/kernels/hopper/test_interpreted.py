"""Kernels in Triton's interpreter, where integers, FP32 and FP64 are as on a card."""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "what",
    ["adapters", "checksum", "dispatch", "int8", "int8_backward", "optimiser"],
)
def test_in_the_interpreter(what: str, tmp_path: Path) -> None:
    run_interpreted(f"tests.kernels.hopper.interpreted_{what}:main", tmp_path)
