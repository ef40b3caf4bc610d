"""Rollout equals training bit for bit with 1, 2 and 4 threads, and with AVX2 kernels, in every
exact flow; and the test can fail.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PROBE = Path(__file__).parent / "exactness_probe.py"
EXACT = ("fp32", "bf16", "fp8-linear", "fp8")
CONTROL = "fp8-rollout"
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@cache
def probed(avx2: bool, /) -> dict[int, tuple[dict[str, int], str]]:
    """Number of threads -> how many log-probabilities differ, and with which instructions."""
    threads = (1, 2) if avx2 else (1, 2, 4)
    presets = EXACT if avx2 else (*EXACT, CONTROL)
    command = [sys.executable, str(PROBE), ",".join(map(str, threads)), *presets]
    environment = os.environ | (AVX2 if avx2 else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = map(json.loads, done.stdout.splitlines())
    return {
        count: (line["differing"], line["instructions"])
        for count, line in zip(threads, lines, strict=True)
    }


@pytest.mark.parametrize(
    ("threads", "avx2"), [(1, False), (2, False), (4, False), (1, True), (2, True)]
)
def test_no_log_probability_differs(threads: int, avx2: bool) -> None:
    differing, instructions = probed(avx2)[threads]
    counts = [differing[name] for preset in EXACT for name in (preset, f"{preset}, alone")]
    assert set(counts) == {0}, differing
    if avx2:
        assert instructions == "AVX2"


def test_the_control_differs() -> None:
    for threads in (1, 2, 4):
        differing, _ = probed(False)[threads]
        assert differing[CONTROL] > 100
