"""The arithmetic of what a death costs, and how the process to kill is found."""

import os
import subprocess
import sys
from itertools import accumulate

import pytest

from benchmarks.rollouter_deaths import WINDOW, lost_seconds, rank_of


@pytest.mark.parametrize("killed", [3, 40, 95])
def test_a_death_costs_what_its_steps_take_longer_than_those_around(killed: int) -> None:
    steps = [1.0] * 100
    steps[killed - 1] += 6.0
    steps[killed + 1] += 0.5
    if killed + 3 * WINDOW < len(steps):
        steps[killed + 3 * WINDOW] += 50.0  # of another death
    assert lost_seconds([*accumulate(steps, initial=5.0)], killed) == pytest.approx(6.5)


def test_a_rank_is_a_child_with_its_number() -> None:
    sleeping = [sys.executable, "-c", "input()"]
    ranks = [
        subprocess.Popen(sleeping, stdin=subprocess.PIPE, env={**os.environ, "RANK": str(rank)})
        for rank in (1, 11)
    ]
    try:
        assert [rank_of(os.getpid(), rank) for rank in (1, 11)] == [one.pid for one in ranks]
        with pytest.raises(RuntimeError, match="has no rank 2"):
            rank_of(os.getpid(), 2)
    finally:
        for one in ranks:
            one.communicate(b"\n")
