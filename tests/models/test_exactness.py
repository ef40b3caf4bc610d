"""Rollout equals training bit for bit with 1, 2 and 4 threads, and with AVX2 kernels, in every
exact flow; and the test can fail.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).parent / "exactness_probe.py"
EXACT = ("fp32", "bf16", "fp8-linear", "fp8")
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def probe(
    threads: int, presets: tuple[str, ...], environment: dict[str, str]
) -> tuple[dict[str, int], str]:
    command = [sys.executable, str(PROBE), str(threads), *presets]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    return result["differing"], result["instructions"]


@pytest.mark.parametrize(
    ("threads", "environment"), [(1, {}), (2, {}), (4, {}), (1, AVX2), (2, AVX2)]
)
def test_no_log_probability_differs(threads: int, environment: dict[str, str]) -> None:
    differing, instructions = probe(threads, EXACT, environment)
    assert len(differing) == 2 * len(EXACT) and set(differing.values()) == {0}, differing
    if environment:
        assert instructions == "AVX2"


def test_the_control_differs() -> None:
    differing, _ = probe(1, ("fp8-rollout",), {})
    assert differing["fp8-rollout"] > 100
