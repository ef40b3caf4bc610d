"""Rollout equals training bit for bit with 1, 2 and 4 threads, and with AVX2 kernels, in every
exact flow; and the test can fail.
"""

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.forked import AVX2, ran
from tests.models import exactness_probe

EXACT = ("fp32", "bf16", "fp8-linear", "fp8", "int8")
CONTROL = "fp8-rollout"
Compared = tuple[dict[str, int], str]


@cache
def with_avx2() -> dict[int, Compared]:
    """By number of threads, from a process of its own."""
    counts = (1, 2)
    with TemporaryDirectory() as folder:
        target, environ = "tests.models.exactness_probe:main", os.environ | AVX2
        done = ran(target, Path(folder), counts, EXACT, environ=environ)
    assert done.returncode == 0, done.stderr
    return dict(zip(counts, map(json.loads, done.stdout.splitlines()), strict=True))


@cache
def with_all_instructions(threads: int, presets: tuple[str, ...] = EXACT) -> Compared:
    return exactness_probe.compared(threads, presets)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("threads", "avx2"), [(1, False), (2, False), (4, False), (1, True), (2, True)]
)
def test_no_log_probability_differs(threads: int, avx2: bool) -> None:
    differing, instructions = with_avx2()[threads] if avx2 else with_all_instructions(threads)
    counts = [differing[name] for preset in EXACT for name in (preset, f"{preset}, alone")]
    assert set(counts) == {0}, differing
    if avx2:
        assert instructions == "AVX2"


@pytest.mark.exhaustive
def test_the_control_differs() -> None:
    for threads in (1, 2, 4):
        differing, _ = with_all_instructions(threads, (CONTROL,))
        assert differing[CONTROL] > 100
