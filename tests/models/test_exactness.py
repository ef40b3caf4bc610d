"""Rollout equals training bit for bit with 1, 2 and 4 threads, and with AVX2 kernels, in every
exact flow; and the test can fail.
"""

import json
import os
from collections.abc import Callable
from functools import cache

import pytest

from tests.forked import called
from tests.models import exactness_probe

EXACT = ("fp32", "bf16", "fp8-linear", "fp8")
CONTROL = "fp8-rollout"
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


Compared = tuple[dict[str, int], str]


@pytest.fixture(scope="module")
def with_avx2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[int, Compared]]:
    """By number of threads, from a process of its own, once it is asked for."""
    counts, log = (1, 2), tmp_path_factory.mktemp("avx2") / "log"

    @cache
    def found() -> dict[int, Compared]:
        environ = os.environ | AVX2
        target = "tests.models.exactness_probe:main"
        process = called(target, log, counts, EXACT, environ=environ)
        process.join()
        assert process.exitcode == 0, log.read_text()
        return dict(zip(counts, map(json.loads, log.read_text().splitlines()), strict=True))

    return found


@cache
def with_all_instructions(threads: int) -> Compared:
    return exactness_probe.compared(threads, (*EXACT, CONTROL))


@pytest.mark.parametrize(
    ("threads", "avx2"), [(1, False), (2, False), (4, False), (1, True), (2, True)]
)
def test_no_log_probability_differs(
    threads: int, avx2: bool, with_avx2: Callable[[], dict[int, Compared]]
) -> None:
    differing, instructions = with_avx2()[threads] if avx2 else with_all_instructions(threads)
    counts = [differing[name] for preset in EXACT for name in (preset, f"{preset}, alone")]
    assert set(counts) == {0}, differing
    if avx2:
        assert instructions == "AVX2"


def test_the_control_differs() -> None:
    for threads in (1, 2, 4):
        differing, _ = with_all_instructions(threads)
        assert differing[CONTROL] > 100
