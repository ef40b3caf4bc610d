"""Rollout equals training bit for bit with 1, 2 and 4 threads, and with AVX2 kernels, in every
exact flow; and the test can fail.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.models import exactness_probe

EXACT = ("fp32", "bf16", "fp8-linear", "fp8")
CONTROL = "fp8-rollout"
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@cache
def with_avx2() -> dict[int, tuple[dict[str, int], str]]:
    """By number of threads, from a process of its own."""
    counts = (1, 2)
    command = [sys.executable, exactness_probe.__file__, ",".join(map(str, counts)), *EXACT]
    done = subprocess.run(
        command, env=os.environ | AVX2, capture_output=True, text=True, check=True
    )
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip(counts, lines, strict=True))


@cache
def with_all_instructions(threads: int) -> tuple[dict[str, int], str]:
    return exactness_probe.compared(threads, (*EXACT, CONTROL))


@pytest.mark.parametrize(
    ("threads", "avx2"), [(1, False), (2, False), (4, False), (1, True), (2, True)]
)
def test_no_log_probability_differs(threads: int, avx2: bool) -> None:
    differing, instructions = with_avx2()[threads] if avx2 else with_all_instructions(threads)
    counts = [differing[name] for preset in EXACT for name in (preset, f"{preset}, alone")]
    assert set(counts) == {0}, differing
    if avx2:
        assert instructions == "AVX2"


def test_the_control_differs() -> None:
    for threads in (1, 2, 4):
        differing, _ = with_all_instructions(threads)
        assert differing[CONTROL] > 100
