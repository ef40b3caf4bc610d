"""Which side computes now, and one scenario of the check instead of all."""

from collections.abc import Callable
from typing import Any

import pytest

from isobit.proof import verify
from isobit.rollout.native import NativeEngine

SCENARIO = "few pages, small chunks, temperature 0.7"


@pytest.fixture
def in_rollout(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the engine computes now."""
    depth = [0]
    exact = NativeEngine.step

    def step(self: NativeEngine) -> Any:
        depth[0] += 1
        try:
            return exact(self)
        finally:
            depth[0] -= 1

    monkeypatch.setattr(NativeEngine, "step", step)
    return lambda: depth[0] > 0


@pytest.fixture
def one_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in which the most happens; a fault that any of all would show is shown by this."""

    every = verify.engine_scenarios

    def chosen(workload: verify.Workload) -> tuple[verify.Scenario, ...]:
        return tuple(s for s in every(workload) if s.name == SCENARIO)

    monkeypatch.setattr(verify, "engine_scenarios", chosen)
